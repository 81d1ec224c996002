#!/usr/bin/env python3
"""A step of Adam, stoker beside torch and DeepSpeed on the processor, in alternating pairs.

    PATH=PEERS/bin:$PATH python3 bench/adam_peers.py [--stoker build/stoker] [--python python3] [--params 64000000] [--threads 2]
        [--pairs-max 60] [--width 0.02] [--seconds-max 0] [--floor 0] [--json FILE]

--python is an interpreter that has torch and deepspeed; it is started once and keeps its state. In each pair, in random order:

bf16_split  `stoker bench adam`: bf16 gradient in, fp32 state (split master), bf16 parameter out; 26 bytes/param
f32         `stoker bench adam`: everything fp32; 28 bytes/param
zero        DeepSpeed, what ZeRO does: bf16 gradient to fp32, CPUAdam, parameter to bf16
ds_fp32     DeepSpeed CPUAdam, everything fp32
torch_fp32  torch's fused AdamW, everything fp32

Ratios: zero / bf16_split (floor: --floor; 0: 3 where DeepSpeed's casts are slow, so that zero takes three times ds_fp32, else 1.5); the faster of
ds_fp32 and torch_fp32 of the same pair / bf16_split (floor 1: never slower); and the same / f32 (told, no floor). It stops when the 95 % interval
of the two medians that have a floor (percentile bootstrap) is within --width on either side, at --pairs-max, or after --seconds-max (0: no limit).
A floor is met if the interval reaches it.

Prints one JSON line a pair, one a ratio ("summary": true), then a table. Exit code 1 if a floor is not met. Only ratios of one run of this script
mean anything: machines drift.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from interval import interval

PAIRS_MIN = 5

PEER = r"""
# Started once; answers a line "WHO TIMES" with the median of so many steps.
import os, sys, time
os.environ["DS_ACCELERATOR"] = "cpu"
import torch, deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
n, threads = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
def leaf():
    p = torch.nn.Parameter(torch.randn(n))
    p.grad = torch.randn(n)
    return p
ds_p, torch_p = leaf(), leaf()
ds = DeepSpeedCPUAdam([ds_p], lr=1e-3)
fused = torch.optim.AdamW([torch_p], lr=1e-3, fused=True)
grad, out = torch.randn(n).bfloat16(), torch.empty(n, dtype=torch.bfloat16)
def zero():
    ds_p.grad.copy_(grad)
    ds.step()
    out.copy_(ds_p.data)
step = {"zero": zero, "ds_fp32": ds.step, "torch_fp32": fused.step}
for f in step.values():
    f()
print("READY torch %s deepspeed %s" % (torch.__version__, deepspeed.__version__), flush=True)
for line in sys.stdin:
    who, times = line.split()
    took = []
    for _ in range(int(times)):
        begin = time.perf_counter()
        step[who]()
        took.append(time.perf_counter() - begin)
    took.sort()
    print("TOOK %.9f" % took[len(took) // 2], flush=True)
"""


class Peers:
    def __init__(self, args, folder):
        script = os.path.join(folder, "peer.py")
        with open(script, "w") as f:
            f.write(PEER)
        self.process = subprocess.Popen([args.python, script, str(args.params), str(args.threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS=str(args.threads)))
        self.versions = " ".join(self.answer("READY"))

    def answer(self, word):
        for line in self.process.stdout:  # DeepSpeed logs to stdout too
            if line.startswith(word):
                return line.split()[1:]
        sys.exit("the peer ended early (are torch and deepspeed installed for --python?)")

    def seconds(self, who, times):
        self.process.stdin.write("%s %d\n" % (who, times))
        self.process.stdin.flush()
        return float(self.answer("TOOK")[0])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def stoker_seconds(args, folder, layout):
    out = os.path.join(folder, "result.json")
    run = subprocess.run([args.stoker, "bench", "adam", "--params", str(args.params), "--threads", str(args.threads), "--layout", layout, "--path",
                          "arrays", "--no-limit", "--pairs", str(args.steps), "--width", "0", "--json", out], capture_output=True, text=True)
    if run.returncode:
        sys.exit("stoker failed: " + run.stderr.strip())
    with open(out) as f:
        return json.load(f)[0]["median_s"]


def ratios_of(pair):
    fastest = min(pair["ds_fp32"], pair["torch_fp32"])
    return {"zero / bf16_split": pair["zero"] / pair["bf16_split"], "fastest fp32 / bf16_split": fastest / pair["bf16_split"],
            "fastest fp32 / f32": fastest / pair["f32"]}


def narrow(args, values):
    low, high = interval(values)
    middle = statistics.median(values)
    return max(high - middle, middle - low) <= args.width * middle


def measure(args, folder, peers):
    order, pairs, begin = random.Random(args.seed), [], time.monotonic()
    floors = {"zero / bf16_split": args.floor or 1.5, "fastest fp32 / bf16_split": 1.0, "fastest fp32 / f32": None}
    while len(pairs) < args.pairs_max:
        who = ["bf16_split", "f32", "zero", "ds_fp32", "torch_fp32"]
        order.shuffle(who)
        pair = {w: stoker_seconds(args, folder, w) if w in ("bf16_split", "f32") else peers.seconds(w, args.steps) for w in who}
        pairs.append(pair)
        print(json.dumps({"bench": "adam_peers", "pair": len(pairs), "seconds": pair, "ratios": ratios_of(pair)}), flush=True)
        if len(pairs) < PAIRS_MIN:
            continue
        if args.seconds_max and time.monotonic() - begin > args.seconds_max:
            break
        if all(narrow(args, [ratios_of(p)[name] for p in pairs]) for name, floor in floors.items() if floor):
            break
    slow_casts = statistics.median(p["zero"] / p["ds_fp32"] for p in pairs) >= 3
    floors["zero / bf16_split"] = args.floor or (3.0 if slow_casts else 1.5)
    return pairs, floors


def summarise(args, peers, pairs, floors):
    good, summary = True, []
    for name, floor in floors.items():
        values = [ratios_of(p)[name] for p in pairs]
        low, high = interval(values)
        met = floor is None or high >= floor
        good = good and met
        summary.append({"bench": "adam_peers", "summary": True, "ratio": name, "median_ratio": statistics.median(values), "low": low, "high": high,
                        "floor": floor, "met": met, "sure": floor is None or low >= floor, "pairs": len(pairs), "params": args.params,
                        "threads": args.threads, "peers": peers.versions})
        print(json.dumps(summary[-1]), flush=True)
    print("\n%-28s %10s %12s   (%d pairs, %d threads, %d parameters, %s)" % ("step", "median ms", "25-75 %", len(pairs), args.threads, args.params,
                                                                          peers.versions))
    for who in pairs[0]:
        ms = sorted(p[who] * 1e3 for p in pairs)
        print("%-28s %10.1f %6.1f-%.1f" % (who, statistics.median(ms), ms[len(ms) // 4], ms[len(ms) * 3 // 4]))
    for s in summary:
        floor = "" if s["floor"] is None else "  floor %.1f: %s" % (s["floor"], "met" if s["met"] else "NOT met")
        print("%-28s %10.2f %6.2f-%.2f%s" % (s["ratio"], s["median_ratio"], s["low"], s["high"], floor))
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"pairs": pairs, "summary": summary}, f, indent=1)
            f.write("\n")
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stoker", default="build/stoker")
    p.add_argument("--python", default="python3")
    p.add_argument("--params", type=int, default=64000000)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--steps", type=int, default=5, help="of each in a pair; their median counts")
    p.add_argument("--pairs-max", type=int, default=60)
    p.add_argument("--width", type=float, default=0.02)
    p.add_argument("--seconds-max", type=float, default=0)
    p.add_argument("--floor", type=float, default=0, help="of zero / bf16_split")
    p.add_argument("--json", help="all pairs and the summary")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="adam-peers-") as folder:
        peers = Peers(args, folder)
        try:
            pairs, floors = measure(args, folder, peers)
        finally:
            peers.close()
        return 0 if summarise(args, peers, pairs, floors) else 1


if __name__ == "__main__":
    sys.exit(main())
