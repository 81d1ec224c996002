#!/usr/bin/env python3
"""The command and its drives: shares, measuring, wear lines, memory that keeps a part of the state.  Issue 4; case MEM-16."""

import os
import re
import sys

from cli_common import SMALL, log, read, read_st, refused, run, run_tests

SWAP = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme", "--chunk", "2048"]


def folders(p, *names):
    paths = [p.at(name) for name in names]
    for path in paths:
        os.makedirs(path, exist_ok=True)
    return ",".join(paths)


def shares(lines):
    """Bytes on each drive over all steps but the first, which has no update."""
    sums = {}
    for line in lines[1:]:
        for d in line["drives"]:
            sums[d["path"]] = sums.get(d["path"], 0) + d["read"] + d["write"]
    return [sums[k] for k in sorted(sums)]


def test_weights_share_the_bytes(p):
    a, b = folders(p, "wa", "wb").split(",")
    out, _ = p.train("weights", "--steps", "4", "--nvme", a + "," + b, "--nvme-weights", "3,1", "--log", p.at("w.jsonl"), *SWAP)
    moved = shares(log(p.at("w.jsonl")))
    assert 2.4 < moved[0] / moved[1] < 3.7, moved
    said = [float(x) for x in re.findall(r"\(([0-9.]+) % of the state there\)", out)]
    assert abs(said[0] - 75) < 6 and abs(said[0] + said[1] - 100) < 0.2, out
    assert os.listdir(a) == [] and os.listdir(b) == []


def test_measure_drives(p):
    both = folders(p, "ma", "mb")
    out, _ = p.train("measured", "--steps", "2", "--nvme", both, "--measure-drives", "0.2", *SWAP)
    assert "both at once" in out and "GB/s" in out and "at most" in out and "over the rates measured at the start" in out, out
    out, _ = p.train("unmeasured", "--steps", "2", "--nvme", both, "--measure-drives", "off", *SWAP)
    assert "not measured" in out and "both at once" not in out, out
    for name in both.split(","):
        assert os.listdir(name) == []
    assert read(p.at("measured", "model.safetensors")) == read(p.at("unmeasured", "model.safetensors"))


def test_a_dry_run_says_what_a_step_writes(p):
    both = folders(p, "da", "db")
    # a buffer of a chunk: one that holds all of so small a model would leave no gradient to write
    out, _ = p.train("dry", "--steps", "2", "--nvme", both, "--nvme-weights", "1,1", "--dry-run", "--nvme-buffer", "64KiB", *SWAP)
    for words in ("a step reads", "to NVMe per step", "--optimizer-state host", "--grads host", "--host-memory", "--batch",
                  "endurance"):
        assert words in out, (words, out)


def test_wear_and_busiest_at_the_end(p):
    out, _ = p.train("wear", "--steps", "3", "--nvme", folders(p, "ea"), *SWAP)
    assert re.search(r"^writes     .* per step, at this speed [0-9.]+ TB a day", out, re.M), out
    assert re.search(r"^busiest    (NVMe|compute), a step takes [0-9.]+x .*: compute [0-9.]+ %.*NVMe [0-9.]+ %", out, re.M), out
    out, _ = p.train("nowear", "--steps", "2")
    assert "busiest    compute" in out and "TB a day" not in out, out


def test_start_and_end_agree_on_what_a_step_writes(p):
    """The last update is written after the last step's line; the end counts it, whatever moved between the steps.  It counts whole
    blocks of the drive, which matters for chunks as small as these."""
    for name, more in (("agree", []), ("agree_saved", ["--checkpoint-every", "2", "--update", "serial"])):
        out, _ = p.train(name, "--steps", "3", "--nvme", folders(p, name + "-nvme"), *SWAP, *more)
        said = re.search(r"a step reads .* and writes ([0-9.]+) KiB \(", out).group(1)
        measured = re.search(r"^writes     ([0-9.]+) KiB to .* per step, at this speed", out, re.M).group(1)
        assert 1 <= float(measured) / float(said) < 1.25, (name, said, measured)


def test_log_has_busy_time_and_latency(p):
    p.train("figures", "--steps", "3", "--nvme", folders(p, "fa"), "--log", p.at("f.jsonl"), *SWAP)
    for line in log(p.at("f.jsonl")):
        assert 0 < line["nvme_busy_s"] <= line["step_s"] * 1.001, line
        assert line["nvme_read_p99_s"] > 0, line
        assert [d["path"] for d in line["drives"]] == [p.at("fa")], line


def test_mem_16_memory_to_spare_keeps_a_part(p):
    """NVMe bytes of a step fall with the budget, and the model is the same."""
    nvme = folders(p, "ka")
    args = ["--nvme", nvme, "--optimizer-state", "nvme", "--chunk", "2048"]
    base, _ = p.train("k", "--steps", "3", "--log", p.at("k.jsonl"), *args)
    assert "kept in memory" not in base
    want, before = read_st(p.at("k", "model.safetensors")), log(p.at("k.jsonl"))[-1]["bytes"]["nvme_write"]
    assert before > 0
    out, _ = p.train("all", "--steps", "3", "--log", p.at("all.jsonl"), "--host-memory", "1GiB", *args)
    assert re.search(r"optimizer state: (\d+) of \1 chunks \(100.0 %", out), out
    assert "optimizer state kept in memory" in out
    assert log(p.at("all.jsonl"))[-1]["bytes"]["nvme_write"] == 0
    assert read_st(p.at("all", "model.safetensors")) == want


def test_refusals(p):
    both = folders(p, "ra", "rb")
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--steps", "1", *SMALL]
    for more, words in [
            (["--nvme", both, "--nvme-weights", "1"], ["--nvme-weights", "1 shares for 2 folders"]),
            (["--nvme", both, "--nvme-weights", "1,x"], ["--nvme-weights", '"x"']),
            (["--nvme", both, "--nvme-weights", "1,-1"], ["--nvme-weights", '"-1"']),
            (["--nvme", both, "--nvme-weights", "0,0"], ["--nvme-weights", "every share is 0"]),
            (["--nvme", both, "--measure-drives", "sometimes"], ["--measure-drives", "auto, off"]),
            (["--nvme", both, "--measure-drives", "-1"], ["--measure-drives", "auto, off"]),
            (["--measure-drives", "1"], ["--measure-drives", "no effect"]),
            (["--nvme-weights", "1"], ["--nvme-weights", "0 folders"])]:
        refused(2, words, *base, *more, absent=[p.at("never")])


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
