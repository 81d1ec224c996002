#!/usr/bin/env python3
"""The same training run under every placement and update mode: one curve, to the bit.

    python3 bench/convergence.py --stoker build/stoker --model DIR --data FILE [--steps 300] [--batch 8] [--seq 128] [--lr 1.5e-3] [--dir DIR]
                                 [--out bench/results/convergence]

DIR and FILE: as the demo leaves them (demo-out/model, demo-out/train.safetensors). Runs without offload, with states in memory on a discrete device, on
NVMe, in both accumulation orders, and in each update mode, all else equal; compares every step's loss and the final weights with those of the first run.
Writes OUT.svg, the curves, and OUT.json. Exit code 1 if a bit differs.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

NVME = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]
DISCRETE = ["--device", "host:discrete"]
RUNS = [
    ("no offload, serial", ["--params", "host", "--optimizer-state", "host", "--update", "serial"]),
    ("memory, chase", DISCRETE + ["--params", "host", "--optimizer-state", "host", "--update", "chase"]),
    ("memory, split", DISCRETE + ["--params", "host", "--optimizer-state", "host", "--update", "split"]),
    ("memory, speculate", DISCRETE + ["--params", "host", "--optimizer-state", "host", "--update", "speculate"]),
    ("NVMe, chase, recomputed", DISCRETE + NVME + ["--update", "chase", "--activations", "recompute"]),
    ("NVMe, speculate", NVME + ["--update", "speculate"]),
    ("NVMe, micro-batch-major", NVME + ["--update", "chase", "--accumulate", "micro"]),
]


def one(args, folder, options):
    out, nvme, log = (os.path.join(folder, x) for x in ("out", "nvme", "log.jsonl"))
    for path in (out, nvme):
        shutil.rmtree(path, ignore_errors=True)
    os.makedirs(nvme)
    command = [args.stoker, "train", "--model", args.model, "--data", args.data, "--out", out, "--steps", str(args.steps), "--seq", str(args.seq),
               "--batch", str(args.batch), "--micro-batch", str(max(1, args.batch // 2)), "--lr", str(args.lr), "--schedule", "cosine", "--warmup", "10",
               "--beta2", "0.99", "--seed", "0", "--log", log, "--progress", "none", "--nvme", nvme] + options
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit("%s: %s" % (" ".join(options), run.stderr.strip()))
    with open(log) as f:
        lines = [json.loads(x) for x in f]
    os.remove(log)
    digest = hashlib.sha256()
    with open(os.path.join(out, "model.safetensors"), "rb") as f:
        for piece in iter(lambda: f.read(1 << 20), b""):
            digest.update(piece)
    return {"loss": [x["loss"] for x in lines], "grad_norm": [x["grad_norm"] for x in lines], "sha256": digest.hexdigest(),
            "speculated": sum(x.get("spec_chunks", 0) for x in lines), "undone": sum(x.get("spec_undone", 0) for x in lines),
            "seconds": sum(x["step_s"] for x in lines) if "step_s" in lines[0] else None}


def plot(results, path):
    w, h, left, bottom = 900, 420, 60, 40
    top = max(max(r["loss"]) for r in results.values())
    low = min(min(r["loss"]) for r in results.values())
    colours = ["#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"]
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">' % (w, h),
             '<rect width="%d" height="%d" fill="white"/>' % (w, h)]
    for k in range(6):
        y = h - bottom - k / 5 * (h - bottom - 20)
        parts.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="8" y="%.1f">%.2f</text>' %
                     (left, w - 10, y, y, y + 4, low + k / 5 * (top - low)))
    for i, (name, r) in enumerate(results.items()):
        n = len(r["loss"])
        points = " ".join("%.1f,%.1f" % (left + x / max(1, n - 1) * (w - left - 10), h - bottom - (y - low) / (top - low) * (h - bottom - 20))
                          for x, y in enumerate(r["loss"]))
        # the widest below: equal curves show as bands
        width = 1 + 1.5 * (len(results) - 1 - i)
        parts.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="%.1f"/>' % (points, colours[i % len(colours)], width))
        parts.append('<rect x="%d" y="%d" width="12" height="12" fill="%s"/><text x="%d" y="%d">%s</text>' %
                     (w - 230, 20 + 18 * i, colours[i % len(colours)], w - 212, 31 + 18 * i, name))
    parts.append('<text x="%d" y="%d">step (%d); loss of the step, upwards</text></svg>' % (left, h - 12, len(next(iter(results.values()))["loss"])))
    with open(path, "w") as f:
        f.write("\n".join(parts) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stoker", default="build/stoker")
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--dir")
    p.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "convergence"))
    args = p.parse_args()
    results, same = {}, True
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for name, options in RUNS:
            r = results[name] = one(args, folder, options)
            first = results[RUNS[0][0]]
            equal = r["loss"] == first["loss"] and r["grad_norm"] == first["grad_norm"] and r["sha256"] == first["sha256"]
            same = same and equal
            print("%-28s last loss %.6f  weights %s  %s%s" % (name, r["loss"][-1], r["sha256"][:16], "equal" if equal else "DIFFERENT",
                  "  %d chunks speculated, %d undone" % (r["speculated"], r["undone"]) if r["speculated"] else ""), flush=True)
    plot(results, args.out + ".svg")
    with open(args.out + ".json", "w") as f:
        json.dump({"steps": args.steps, "batch": args.batch, "seq": args.seq, "lr": args.lr, "equal": same,
                   "runs": {k: {x: r[x] for x in ("sha256", "speculated", "undone")} for k, r in results.items()},
                   "loss": results[RUNS[0][0]]["loss"]}, f)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
