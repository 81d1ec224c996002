#!/usr/bin/env python3
"""Disks that are too small, become full, or cannot be written: a tmpfs of a chosen size in a namespace of its own (skipped where
that is not allowed).  Issue: shown 7; cases CKP-16, CKP-37."""

import os
import re
import subprocess
import sys
import time

from cli_common import SMALL, log, read, refused, run, run_tests, skip, write
from test_cli_runs import start, wait_for_step


class Tmpfs:
    """A mount that only this child and whoever goes through /proc/PID/root sees."""

    def __init__(self, p, size, name="mnt"):
        self.folder = p.at(name)
        os.makedirs(self.folder, exist_ok=True)
        script = 'mount -t tmpfs -o size=%s tmpfs "$0" && echo ready && exec sleep 300' % size
        try:
            self.child = subprocess.Popen(["unshare", "-rm", "sh", "-c", script, self.folder], stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL)
        except OSError:
            skip("no unshare")
        if self.child.stdout.readline() != b"ready\n":
            self.child.wait()
            skip("mounts in a user namespace are not allowed here")
        self.path = "/proc/%d/root%s" % (self.child.pid, os.path.realpath(self.folder))

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()
        self.child.stdout.close()


def fill(disk):
    try:
        with open(disk + "/filler", "wb", buffering=0) as f:
            while f.write(b"\0" * 4096):
                pass
    except OSError:
        pass


def in_time(begin):
    assert time.monotonic() - begin < float(os.environ.get("STOKER_TEST_REFUSAL_S", "2")), "slow refusal"


def test_nvme_folder_too_small_is_refused(p):
    with Tmpfs(p, "128k") as disk:
        begin = time.monotonic()
        refused(1, ["--nvme", "KiB"], "train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--steps", "1", *SMALL,
                "--nvme", disk, "--params", "nvme", "--optimizer-state", "nvme", absent=[p.at("never")])
        in_time(begin)
        assert os.listdir(disk) == []


def test_out_disk_too_small_is_refused(p):
    with Tmpfs(p, "512k") as disk:
        begin = time.monotonic()
        refused(1, ["--out", "free"], "train", "--model", p.model, "--data", p.data, "--out", disk + "/o", "--steps", "1", *SMALL,
                absent=[disk + "/o"])
        refused(1, ["--out", "free"], "init", "--config", p.model + ".json", "--out", disk + "/m", absent=[disk + "/m"])
        in_time(begin)
        assert os.listdir(disk) == []


def test_read_only_out_is_refused(p):
    with Tmpfs(p, "4m") as disk:
        pid = disk.split("/")[2]
        done = subprocess.run(["nsenter", "-t", pid, "-U", "-m", "--preserve-credentials", "mount", "-o", "remount,ro",
                               os.path.realpath(p.at("mnt"))], stderr=subprocess.DEVNULL)
        if done.returncode != 0:
            skip("no remount")
        refused(1, ["--out", "written to"], "train", "--model", p.model, "--data", p.data, "--out", disk + "/o", "--steps", "1", *SMALL)
        refused(1, ["--nvme", "writable"], "train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--steps", "1", *SMALL,
                "--nvme", disk, "--params", "nvme", absent=[p.at("never")])


def test_ckp_16_ckp_37_disk_full_at_a_save_keeps_the_last_checkpoint(p):
    with Tmpfs(p, "3m") as disk:
        child = start(p, disk + "/o", "--steps", "1200", "--checkpoint-every", "100", "--log", p.at("full.jsonl"))
        wait_for_step(p.at("full.jsonl"), 110, child)
        checkpoints = disk + "/o/checkpoints"
        fill(disk)
        wait_for_step(p.at("full.jsonl"), 350, child)
        assert [x for x in os.listdir(checkpoints) if x.startswith("step-")]
        os.remove(disk + "/filler")
        _, err = child.communicate(timeout=100)
        assert child.returncode == 0, err
        assert b"ALARM" in err and b"training goes on" in err, err
        for step, what in re.findall(rb"no checkpoint of step (\d+): (.*); training goes on", err):
            assert b"ALARM: step " + step + b": " + what not in err, err  # said once
        assert os.path.exists(disk + "/o/model.safetensors")
        assert "step-00001200" not in os.listdir(checkpoints)
        newest = sorted(os.listdir(checkpoints))[-1]
        run("export", "--checkpoint", checkpoints + "/" + newest, "--out", p.at("after-full"))


def test_disk_full_at_the_export_leaves_no_model(p):
    with Tmpfs(p, "3m") as disk:
        child = start(p, disk + "/o", "--steps", "1500", "--log", p.at("end.jsonl"))
        wait_for_step(p.at("end.jsonl"), 10, child)
        fill(disk)
        _, err = child.communicate(timeout=100)
        assert child.returncode == 1 and len(err.strip().splitlines()) == 1, err
        assert not os.path.exists(disk + "/o/model.safetensors") and not os.path.exists(disk + "/o/config.json")


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
