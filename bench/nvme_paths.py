#!/usr/bin/env python3
"""Several paths of different speed: what `stoker bench nvme P1 P2 ..` gets from all together against the sum of each alone.

    sudo python3 bench/nvme_paths.py --dir DIR [--stoker build/stoker] [--speeds 60,30,20,10] [--paths 2,3,4] [--time 40] [--floor 0.95]

Needs root: makes loop devices (direct I/O to their files) with ext4 in DIR, mounts them, and throttles each to its speed in MB/s, reads and writes
apart, with a blkio group of cgroup v1 (blkio.throttle.{read,write}_bps_device) that this process and its children are in. Everything is undone at
the end, also after an error or a signal: mounts, devices, group, files.

For each number of paths: the first that many of --speeds. Prints one JSON line per number of paths and mode: the rate of each path alone, of all
together, their share of the sum, and the share of the speeds that were set; then a summary line. Exit code 1 if a share is under --floor.

Reads of one throttled device are limited apart from its writes, so `mixed` is held to the sum of the paths alone, not to the speeds.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

GROUPS = "/sys/fs/cgroup/blkio"


def command(*args):
    done = subprocess.run([str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError("%s: %s" % (" ".join(map(str, args)), done.stderr.strip()))
    return done.stdout.strip()


class Drives:
    """Loop devices, mounted and throttled; `with` undoes all of it."""

    def __init__(self, folder, speeds_mb, size_mb):
        self.folder, self.speeds, self.size_mb = folder, speeds_mb, size_mb
        self.devices, self.mounts, self.paths = [], [], []
        self.group = os.path.join(GROUPS, "stoker-paths-%d" % os.getpid())

    def __enter__(self):
        try:
            os.mkdir(self.group)
            for i, speed in enumerate(self.speeds):
                self.add(i, speed)
            with open(os.path.join(self.group, "tasks"), "w") as f:
                f.write(str(os.getpid()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def add(self, i, speed):
        image, mount = os.path.join(self.folder, "image%d" % i), os.path.join(self.folder, "path%d" % i)
        with open(image, "wb") as f:
            os.posix_fallocate(f.fileno(), 0, self.size_mb << 20)
        device = command("losetup", "--find", "--show", "--direct-io=on", image)
        self.devices.append(device)
        command("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        os.mkdir(mount)
        command("mount", device, mount)
        self.mounts.append(mount)
        self.paths.append(mount)
        number = os.stat(device).st_rdev
        for direction in ("read", "write"):
            with open(os.path.join(self.group, "blkio.throttle.%s_bps_device" % direction), "w") as f:
                f.write("%d:%d %d" % (os.major(number), os.minor(number), int(speed * 1e6)))

    @staticmethod
    def unmount(mount):
        """The kernel takes a moment to let go of the files of an io_uring after its process has ended."""
        for _ in range(100):
            done = subprocess.run(["umount", mount], stderr=subprocess.PIPE, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.1)
        print(done.stderr.strip(), file=sys.stderr)

    def __exit__(self, *_):
        try:
            with open(os.path.join(GROUPS, "tasks"), "w") as f:
                f.write(str(os.getpid()))
        except OSError as e:
            print("leaving the group: %s" % e, file=sys.stderr)
        for mount in self.mounts:
            self.unmount(mount)
        for device in self.devices:
            subprocess.run(["losetup", "--detach", device])
        if os.path.isdir(self.group):
            os.rmdir(self.group)


def measure(args, paths, folder):
    out = os.path.join(folder, "result.json")
    done = subprocess.run([args.stoker, "bench", "nvme"] + paths + ["--block", "1MiB", "--depth", "16", "--size", args.size, "--mode",
                           "read,write,mixed", "--time", str(args.time), "--no-fio", "--json", out],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if args.verbose:
        print(done.stdout, file=sys.stderr)
    if done.returncode:
        raise RuntimeError("stoker failed: " + done.stderr.strip())
    with open(out) as f:
        return json.load(f)


def report(args, results, paths, speeds):
    worst = 1e9
    for mode in ("read", "write", "mixed"):
        here = [r for r in results if r["mode"] == mode]
        together = [r for r in here if r["together"]][0]
        alone = [next(r["bytes_per_s"] for r in here if not r["together"] and r["paths"][0]["path"] == p) for p in paths]
        share = together["bytes_per_s"] / sum(alone)
        worst = min(worst, share)
        print(json.dumps({"bench": "nvme_paths", "paths": len(paths), "mode": mode, "alone_bytes_per_s": alone,
                          "together_bytes_per_s": together["bytes_per_s"], "by_path": [p["bytes_per_s"] for p in together["paths"]],
                          "share_of_sum": share, "share_of_speeds": together["bytes_per_s"] / (sum(speeds) * 1e6),
                          "valid": together["valid"]}), flush=True)
    return worst


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dir", required=True, help="where the devices' files are made; about 300 MB each")
    p.add_argument("--stoker", default="build/stoker")
    p.add_argument("--speeds", default="60,30,20,10", help="MB/s of each path")
    p.add_argument("--paths", default="2,3,4")
    p.add_argument("--size", default="32MiB", help="file of the measurement on each path")
    p.add_argument("--time", type=float, default=40, help="seconds for each number of paths")
    p.add_argument("--floor", type=float, default=0.95)
    p.add_argument("--verbose", action="store_true")
    args = p.parse_args()
    args.stoker = os.path.abspath(args.stoker)
    if os.geteuid() != 0:
        sys.exit("nvme_paths.py: needs root for loop devices, mounts and the throttle")
    if not os.path.isdir(GROUPS):
        sys.exit("nvme_paths.py: no cgroup v1 blkio hierarchy at " + GROUPS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the folders are undone on the way out
    speeds = [float(s) for s in args.speeds.split(",")]
    folder, worst = tempfile.mkdtemp(prefix="nvme-paths-", dir=args.dir), 1e9
    try:
        with Drives(folder, speeds, 300) as drives:
            for n in [int(k) for k in args.paths.split(",")]:
                worst = min(worst, report(args, measure(args, drives.paths[:n], folder), drives.paths[:n], speeds[:n]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"bench": "nvme_paths", "summary": True, "worst_share_of_sum": worst, "floor": args.floor, "met": worst >= args.floor}))
    return 0 if worst >= args.floor else 1


if __name__ == "__main__":
    sys.exit(main())
