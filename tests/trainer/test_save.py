#!/usr/bin/env python3
"""Checkpoints beside the steps, as a user has them: the same files as between the steps, said when complete, kills at random moments.

STK_SEED, STK_SOAK=1: many more kills.
"""

import glob
import os
import random
import re
import subprocess
import sys
import time

from cli_common import *  # noqa: F401,F403

SEED = int(os.environ.get("STK_SEED", "20261130"))
KILLS = 60 if os.environ.get("STK_SOAK") else 6
STEPS = 40


def same_folders(a, b):
    names = sorted(os.listdir(a))
    assert names == sorted(os.listdir(b)) and "manifest.json" in names, (a, b)
    for name in names:
        assert read(os.path.join(a, name)) == read(os.path.join(b, name)), name


def checkpoints(p, name):
    return sorted(x for x in os.listdir(p.at(name, "checkpoints")))


def weights(p, name):
    return read(p.at(name, "model.safetensors"))


def test_beside_and_between_write_the_same_files(p):
    nvme = p.at("nvme")
    os.mkdir(nvme)
    for k, where in enumerate([[], ["--nvme", nvme, "--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]]):
        for mode in ["sync", "async"]:
            name = "%s%d" % (mode, k)
            out, _ = p.train(name, "--steps", "9", *where, "--checkpoint-every", "2", "--keep-checkpoints", "9", "--checkpoint", mode,
                             "--log", p.at(name + ".jsonl"))
            told = re.findall(r"^checkpoint \S+/step-0*(\d+)  [0-9.]+ s,? (?:beside the steps|the run waited)", out, re.M)
            assert told == ["2", "4", "6", "8"], out
            assert ("beside the steps" in out) == (mode == "async") and ("the run waited" in out) == (mode == "sync"), out
            assert checkpoints(p, name) == ["step-%08d" % i for i in (2, 4, 6, 8)]
        for step in checkpoints(p, "sync%d" % k):
            same_folders(p.at("sync%d" % k, "checkpoints", step), p.at("async%d" % k, "checkpoints", step))
        assert weights(p, "sync%d" % k) == weights(p, "async%d" % k)
        lines = log(p.at("async%d.jsonl" % k))
        assert all(x["save_wait_s"] >= 0 and x["saving"] in (True, False) for x in lines)
        assert lines[-1]["saved_step"] >= 6


def on_device(part):
    """Blocks whose state lies in the device's memory; 0: none, on this machine's own."""
    return ["--device", "host:discrete", "--optimizer-on-device", str(part)] if part else []


def test_state_on_the_device_writes_the_same_files_and_resumes_anywhere(p):
    for k, part in enumerate([0, 0.4, 1]):
        for mode in ["sync", "async"]:
            name = "device%d%s" % (k, mode)
            out, _ = p.train(name, "--steps", "6", *on_device(part), "--checkpoint-every", "2", "--keep-checkpoints", "9", "--checkpoint", mode)
            row = re.search(r"^  device  optimizer state on the device +[0-9.]+ ", out, re.M)
            assert bool(row) == bool(part) == ("optimizer state on the device: " in out), out
            for step in checkpoints(p, "device0sync"):
                same_folders(p.at("device0sync", "checkpoints", step), p.at(name, "checkpoints", step))
            assert weights(p, name) == weights(p, "device0sync")
    for k, part in enumerate([0.4, 1, 0]):  # from another part
        p.train("moved%d" % k, "--steps", "2", *on_device([1, 0, 0.4][k]), "--save-final-state")
        p.train("moved%d" % k, "--steps", "6", *on_device(part), "--resume")
        assert weights(p, "moved%d" % k) == weights(p, "device0sync")


def test_async_is_the_default_and_other_words_are_refused(p):
    out, _ = p.train("default", "--steps", "3", "--checkpoint-every", "2")
    assert "beside the steps" in out, out
    refused(2, "--checkpoint", "train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--steps", "1", "--checkpoint", "later",
            absent=[p.at("never")])


def test_the_last_step_and_the_final_state(p):
    p.train("final", "--steps", "4", "--checkpoint-every", "2", "--save-final-state")
    p.train("final-sync", "--steps", "4", "--checkpoint-every", "2", "--save-final-state", "--checkpoint", "sync")
    assert checkpoints(p, "final") == ["step-00000002", "step-00000004"]
    for step in checkpoints(p, "final"):
        same_folders(p.at("final", "checkpoints", step), p.at("final-sync", "checkpoints", step))


def test_kill_9_at_random_moments(p):
    rng = random.Random(SEED)
    begin = time.monotonic()
    p.train("whole", "--steps", STEPS, "--checkpoint-every", "2")
    took = time.monotonic() - begin
    want, kills, k, partial = weights(p, "whole"), 0, 0, 0
    while kills < KILLS:
        k += 1
        name = "kill%d" % k
        options = ["--steps", STEPS, "--checkpoint-every", rng.choice([1, 2, 3])]
        where, then = on_device(rng.choice([0, 0.4, 1])), on_device(rng.choice([0, 0.4, 1]))
        child = subprocess.Popen([STOKER, "train", "--model", p.model, "--data", p.data, "--out", p.at(name), *map(str, options), *where, *SMALL],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.1, 1) * took)  # where it dies is the test's only chance, not its truth
        alive = child.poll() is None
        child.kill()
        child.wait()
        kills += alive
        if not alive:
            continue
        left = glob.glob(p.at(name, "checkpoints", ".partial-*"))
        partial += bool(left)
        steps = glob.glob(p.at(name, "checkpoints", "step-*"))
        if not os.path.exists(p.at(name, "config.json")):
            out, _ = p.train(name, *options, *then, *(["--resume"] if steps else []))
            assert all("removed" in out and os.path.basename(x) in out for x in left), out
        assert weights(p, name) == want, "kill %d, STK_SEED %d" % (k, SEED)
        assert not glob.glob(p.at(name, "checkpoints", ".partial-*"))
    print("# seed %d: %d kills, %d left a folder behind" % (SEED, kills, partial))


run_tests(sys.modules[__name__])
