#!/usr/bin/env python3
"""Shares of our transfers beside fio, DeepSpeed's async I/O and the plain file, in alternating pairs.

    python3 bench/nvme_pairs.py --dir DIR [--what fio,store,deepspeed] [--stoker build/stoker] [--store-pairs build/bench/store_pairs]
        [--modes read,write,mixed] [--blocks 1MiB,4MiB] [--depth N] [--size 1GiB] [--run 1.5] [--pairs-max 60] [--width 0.02]
        [--python PYTHON] [--seconds-max 0] [--seed 1]

fio        each mode and block size: `stoker bench nvme` at that one point, fio on the same file inside each pair (floor 0.97)
store      reads and writes: the extent store with checksums over plain transfers (floor 0.95), over itself without checksums
           (floor 0.97: checksums cost under 3 %). All three move the same bytes of one file through the same memory. Each pair is
           a start of its own (a new process, file, memory): what is particular to one start is not taken for the store's cost
deepspeed  1 MiB x 32 (or --depth), 1 GiB: our reads over DeepSpeed's async I/O (floor 1.1), our writes beside. Needs --python, an interpreter that
           has deepspeed and torch; left out without it.

The two sides of a pair run one after the other, in random order. After at least 5 pairs it stops when the 95 % interval of the median ratio
(percentile bootstrap) is within --width of the median on either side, or at --pairs-max, or when --seconds-max has passed for this comparison
(0: no limit). A floor is MET when the interval reaches it: "met" compares the interval's upper end, "sure" its lower end.

Prints one JSON line a pair, then one summary line a comparison ("summary": true; ratio_min and ratio_max are the spread over its pairs,
theirs_min and theirs_max how far the drive itself moved meanwhile). Exit code 1 if a floor is not met. Only ratios of one run of this
script mean anything: machines drift. Leaves nothing in DIR.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from interval import interval

FLOORS = {"fio": 0.97, "store": 0.95, "checksums": 0.97, "deepspeed_read": 1.1}
PAIRS_A_RUN = 5
PAIRS_MIN = 5

DEEPSPEED = r"""
# Answers each line "read" or "write" with seconds and bytes. The page cache is not between: DeepSpeed opens with O_DIRECT.
import sys, time, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
out = sys.stdout
handle = AsyncIOBuilder().load().aio_handle(1 << 20, int(sys.argv[3]), False, True, 2)
n, path = int(sys.argv[1]), sys.argv[2]
empty = torch.empty(0, dtype=torch.uint8)
t = handle.new_cpu_locked_tensor(n, empty) if hasattr(handle, "new_cpu_locked_tensor") else torch.empty(n, dtype=torch.uint8)
t.random_()
handle.async_pwrite(t, path)
handle.wait()
print("READY", flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    (handle.async_pread if line.strip() == "read" else handle.async_pwrite)(t, path)
    handle.wait()
    print("TOOK %.9f %d" % (time.perf_counter() - begin, n), flush=True)
"""


def say(**fields):
    print(json.dumps(fields), flush=True)


class Comparison:
    """Ratios of one comparison; knows when they are enough."""

    def __init__(self, args, what, floor, **labels):
        self.args, self.what, self.floor, self.labels = args, what, floor, labels
        self.ratios, self.ours, self.theirs, self.begin = [], [], [], time.monotonic()

    def add(self, ours, theirs):
        self.ratios.append(ours / theirs)
        self.ours.append(ours)
        self.theirs.append(theirs)
        say(bench="nvme_pairs", what=self.what, pair=len(self.ratios), ours_bytes_per_s=ours, theirs_bytes_per_s=theirs, ratio=ours / theirs,
            **self.labels)

    def wanted(self):
        """Pairs of the next run: never more than --pairs-max in all."""
        return max(1, min(PAIRS_A_RUN, self.args.pairs_max - len(self.ratios)))

    def enough(self):
        n = len(self.ratios)
        if n >= self.args.pairs_max:
            return True
        if self.args.seconds_max and time.monotonic() - self.begin > self.args.seconds_max and n >= PAIRS_MIN:
            return True
        if n < PAIRS_MIN:
            return False
        low, high = interval(self.ratios, self.args.seed)
        middle = statistics.median(self.ratios)
        return max(high - middle, middle - low) <= self.args.width * middle

    def summary(self):
        low, high = interval(self.ratios, self.args.seed)
        met = self.floor is None or high >= self.floor
        say(bench="nvme_pairs", summary=True, what=self.what, pairs=len(self.ratios), median_ratio=statistics.median(self.ratios),
            low=low, high=high, floor=self.floor, met=met, sure=self.floor is None or low >= self.floor,
            ratio_min=min(self.ratios), ratio_max=max(self.ratios), ours_median=statistics.median(self.ours),
            theirs_median=statistics.median(self.theirs), theirs_min=min(self.theirs), theirs_max=max(self.theirs), **self.labels)
        return met


def stoker_point(args, folder, mode, block, depth, pairs, fio, seed):
    """Results of one `stoker bench nvme` at one point: [(ours, fio or None)]."""
    out = os.path.join(folder, "result.json")
    fio_s = 0.5 if fio else 0
    seconds = pairs * (args.run * (2 if fio else 1) + fio_s) / 0.85
    command = [args.stoker, "bench", "nvme", folder, "--mode", mode, "--block", block, "--depth", str(depth), "--size", args.size,
               "--pairs", str(pairs), "--time", "%.1f" % max(1, seconds), "--seed", str(seed), "--write-max", "1TiB", "--json", out]
    run = subprocess.run(command + ([] if fio else ["--no-fio"]), capture_output=True, text=True)
    if run.returncode:
        sys.exit("stoker failed: " + run.stderr.strip())
    with open(out) as f:
        result = json.load(f)[0]
    if not result["valid"]:
        sys.exit("not a measurement of a drive: " + result["why_invalid"])
    return result


def compare_fio(args, folder):
    good = True
    for mode in args.modes.split(","):
        for block in args.blocks.split(","):
            c = Comparison(args, "fio", FLOORS["fio"], mode=mode, block=block, depth=args.depth or 16)
            seed = args.seed
            while not c.enough():
                result = stoker_point(args, folder, mode, block, args.depth or 16, c.wanted(), True, seed)
                seed += 1
                if not result["pairs_ours_fio"]:
                    sys.exit("fio gave no figures (installed? `stoker bench nvme` says why)")
                for ours, theirs in result["pairs_ours_fio"]:
                    c.add(ours, theirs)
            good = c.summary() and good
    return good


def compare_store(args, folder):
    good = True
    for mode in [m for m in args.modes.split(",") if m in ("read", "write")]:
        for block in args.blocks.split(","):
            plain = Comparison(args, "store", FLOORS["store"], mode=mode, block=block, depth=args.depth or 16)
            bare = Comparison(args, "checksums", FLOORS["checksums"], mode=mode, block=block, depth=args.depth or 16)
            seed = args.seed
            while not (plain.enough() and bare.enough()):
                run = subprocess.run([args.store_pairs, "--dir", folder, "--mode", mode, "--block", block, "--depth", str(args.depth or 16), "--size",
                                      args.size, "--rounds", "1", "--run", str(args.run), "--seed", str(seed)],
                                     capture_output=True, text=True)
                seed += 1
                if run.returncode:
                    sys.exit(run.stderr.strip())
                for line in run.stdout.splitlines():
                    r = json.loads(line)
                    plain.add(r["store"], r["plain"])
                    bare.add(r["store"], r["store_no_checksums"])
            good = plain.summary() and good
            good = bare.summary() and good
    return good


def compare_deepspeed(args, folder):
    size, depth = 1 << 30, args.depth or 32
    if not args.python:
        say(bench="nvme_pairs", what="deepspeed", skipped="no --python with deepspeed")
        return True
    script = os.path.join(folder, "peer.py")
    with open(script, "w") as f:
        f.write(DEEPSPEED)
    # Where its memory lies decides over a quarter of DeepSpeed's rate, for as long as its process lives: so each pair asks a new one.
    def theirs(mode):
        peer = subprocess.Popen([args.python, script, str(size), os.path.join(folder, "peer.bin"), str(depth)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                text=True, env=dict(os.environ, DS_ACCELERATOR="cpu"))

        def answer(word):
            for line in peer.stdout:  # DeepSpeed logs to stdout too
                if line.startswith(word):
                    return line.split()[1:]
            sys.exit("the peer ended early (is deepspeed installed for %s?)" % args.python)

        try:
            answer("READY")
            seconds = bytes_moved = 0.0
            while seconds < args.run:
                peer.stdin.write(mode + "\n")
                peer.stdin.flush()
                took, moved = answer("TOOK")
                seconds, bytes_moved = seconds + float(took), bytes_moved + float(moved)
            return bytes_moved / seconds
        finally:
            peer.stdin.close()
            peer.wait()

    order, good, seed = random.Random(args.seed), True, args.seed
    for mode in [m for m in args.modes.split(",") if m in ("read", "write")]:
        c = Comparison(args, "deepspeed", FLOORS["deepspeed_read"] if mode == "read" else None, mode=mode, block="1MiB", depth=depth)
        while not c.enough():
            seed += 1
            first = order.random() < 0.5
            b = theirs(mode) if first else None
            a = stoker_point(args, folder, mode, "1MiB", depth, 1, False, seed)["bytes_per_s"]
            c.add(a, b or theirs(mode))
        good = c.summary() and good
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dir")
    p.add_argument("--what", default="fio,store,deepspeed")
    p.add_argument("--stoker", default="build/stoker")
    p.add_argument("--store-pairs", default="build/bench/store_pairs")
    p.add_argument("--modes", default="read,write,mixed")
    p.add_argument("--blocks", default="1MiB,4MiB")
    p.add_argument("--depth", type=int, help="16, with deepspeed 32")
    p.add_argument("--size", default="1GiB")
    p.add_argument("--run", type=float, default=1.5, help="seconds of each side of a pair")
    p.add_argument("--pairs-max", type=int, default=60)
    p.add_argument("--width", type=float, default=0.02)
    p.add_argument("--seconds-max", type=float, default=0)
    p.add_argument("--python")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    compare = {"fio": compare_fio, "store": compare_store, "deepspeed": compare_deepspeed}
    for what in args.what.split(","):
        if what not in compare:
            sys.exit("--what %s: there are %s" % (what, ", ".join(compare)))
    if not args.dir:
        sys.exit("--dir DIR is needed: a folder on the drive to be measured (--help has the rest)")
    needed = {"--stoker": args.stoker} if {"fio", "deepspeed"} & set(args.what.split(",")) else {}
    if "deepspeed" in args.what.split(",") and args.python:
        needed["--python"] = args.python
    if "store" in args.what.split(","):
        needed["--store-pairs"] = args.store_pairs
    for option, program in needed.items():
        if not shutil.which(program):
            sys.exit("%s %s: is no program that can be run; build it (`ninja -C build`), or name it" % (option, program))
    try:
        folder = tempfile.mkdtemp(prefix="nvme-pairs-", dir=args.dir)
    except OSError as e:
        sys.exit("--dir %s: no folder can be made there (%s); name a folder on the drive to be measured" % (args.dir, e.strerror))
    try:
        good = all([compare[what](args, folder) for what in args.what.split(",")])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
