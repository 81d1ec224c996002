#!/usr/bin/env python3
"""Models of 6.7 and 14.8 billion parameters on a 24 GB card with 64 or 32 GiB of host memory: with NVMe a plan fits, is proved by the
checker (stk_seal does, in a dry run too) and predicted; without, it is refused with the figure of what lacks room and what to add.

The machine is described by share/machines; the shapes are those of bench/predict_table.py. Modes are named: what `auto` weighs takes
half a minute for such a model, and its table is in docs/prediction.md.
"""

import json
import os
import struct
import sys
import tempfile

TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(TREE, "bench"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from cli_common import refused, run, run_tests, write  # noqa: E402
from predict_table import MODELS  # noqa: E402


MACHINE = os.path.join(TREE, "share", "machines", "rtx4090.json")
SEQ, MICRO, TOKENS = 1024, 4, 16384
GIB = 2 ** 30
# parameters, and GiB of optimizer state: 10 bytes a parameter (README, Memory)
SIZES = {"6.7B": (6738415616, "62.76 GiB"), "14.8B": (14770033664, "137.56 GiB")}


class World:
    def __init__(self, model):
        self.temp = tempfile.TemporaryDirectory(prefix="stoker-plan-")
        self.root = self.temp.name
        os.mkdir(self.at("model"))
        write(self.at("model", "config.json"), json.dumps(MODELS[model]))
        write(self.at("data.bin"), struct.pack("<H", 1) * (TOKENS + 1))

    def at(self, *name):
        return os.path.join(self.root, *name)

    def without_drives(self):
        with open(MACHINE) as f:
            machine = dict(json.load(f), drives=[])
        write(self.at("machine.json"), json.dumps(machine))
        return self.at("machine.json")

    def options(self, machine, host):
        return ["plan", "--machine", machine, "--model", self.at("model"), "--data", self.at("data.bin"), "--steps", 1, "--seq", SEQ,
                "--batch", TOKENS // SEQ, "--micro-batch", MICRO, "--host-memory", "%dGiB" % host, "--update", "chase", "--activations",
                "recompute"]


def plan(model, host):
    w = World(model)
    out, _ = run(*w.options(MACHINE, host), "--nvme", w.root, "--json", w.at("plan.json"), "--plan", w.at("plan.txt"))
    with open(w.at("plan.json")) as f:
        p = json.load(f)
    params, _ = SIZES[model]
    assert "%.2f million parameters" % (params / 1e6) in out, out
    peak, card = p["peak_bytes"], 24 * GIB
    assert peak["host"] <= host * GIB, "host memory %d of %d GiB" % (peak["host"], host)
    assert peak["device"] <= card, peak
    # all 12 bytes of a parameter lie in one of the two, gradients are in neither before they are made
    assert peak["host"] + peak["nvme"] >= 12 * params, peak
    assert p["step_s"] > 0 and p["tokens_per_s"] == p["tokens"] / p["step_s"], p
    # no step is faster than its bytes or its FLOPs
    assert p["step_s"] >= max(r["alone_s"] for r in p["resources"]) * 0.999, p
    assert os.path.getsize(w.at("plan.txt")) > 0
    return p


def test_plan_6_7b_64gib_nvme(_):
    plan("6.7B", 64)


def test_plan_6_7b_32gib_nvme_is_slower(_):
    more, less = plan("6.7B", 64), plan("6.7B", 32)
    assert less["step_s"] > more["step_s"], (less["step_s"], more["step_s"])


def test_plan_14_8b_64gib_nvme(_):
    plan("14.8B", 64)


def test_plan_14_8b_32gib_nvme(_):
    plan("14.8B", 32)


def test_plan_without_nvme_is_refused_with_the_figure(_):
    for model, (_, figure) in SIZES.items():
        for host in (64, 32):
            w = World(model)
            refused(1, ["host memory", "--host-memory allows %d.00 GiB" % host, "the largest owner is optimizer state with " + figure,
                        "try --nvme DIR with --optimizer-state nvme"], *w.options(w.without_drives(), host))


def test_plan_kept_from_nvme_is_refused_with_what_helps(_):
    w = World("6.7B")
    refused(1, ["optimizer state with 62.76 GiB", "try --optimizer-state nvme"], *w.options(MACHINE, 64), "--optimizer-state", "host",
            "--params", "host", "--grads", "host")


def test_plan_refusal_names_the_least_that_is_needed(_):
    """Of the activation policies that were tried, the sentence is about the one that lacks least."""
    w = World("6.7B")
    options = w.options(w.without_drives(), 64)
    named = options[:-2]  # --activations auto tries all
    needed = []
    for o in (options, named):
        _, err = run(*o, code=1)
        needed.append(float(err.split("host memory: ")[1].split(" GiB")[0]))
    assert needed[1] <= needed[0], needed


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
