#!/usr/bin/env python3
"""One training run under every placement and update mode: the same curve, to the bit; and the inexact moments beside it.

    python3 bench/convergence.py --demo demo-out [--stoker build/stoker] [--steps 300] [--seeds 3] [--work convergence-work]
                                 [--model DIR] [--batch 8] [--seq 128] [--lr 1.5e-3] [--clip 2] [--out bench/results/convergence]

demo-out: what `./dev demo` leaves (train.safetensors and heldout.safetensors are read). Without --model a llama of 4.2 million parameters is made.
Exact runs (fp32 moments): without offload, states in memory behind a discrete device, on NVMe, in both accumulation orders, in each update mode. Runs
with `--moments bf16` and `8bit` likewise on more than one placement. All runs of one kind must agree in every step's loss and norm and in the final
weights. Then each kind with further seeds of the data's order: the spread of fp32's held-out losses is the measure for the others.
Writes OUT.svg (the curves, and how far the inexact ones are from fp32), OUT.json, OUT.md. Exit code 1 if a bit differs within a kind, or a kind's
mean held-out loss is further from fp32's than fp32's own seeds are from each other (or 0.5 %, if that is more).

Restartable: each finished run is a file of WORK, by its options, model, data and program; what is there is not run again.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys

NVME = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]
HOST = ["--params", "host", "--optimizer-state", "host"]
DISCRETE = ["--device", "host:discrete"]
KINDS = ("fp32", "bf16", "8bit")
RUNS = [  # kind of moments, name, options
    ("fp32", "no offload, serial", HOST + ["--update", "serial"]),
    ("fp32", "memory, chase", DISCRETE + HOST + ["--update", "chase"]),
    ("fp32", "memory, split", DISCRETE + HOST + ["--update", "split"]),
    ("fp32", "memory, speculate", DISCRETE + HOST + ["--update", "speculate"]),
    ("fp32", "NVMe, chase, recomputed", DISCRETE + NVME + ["--update", "chase", "--activations", "recompute"]),
    ("fp32", "NVMe, speculate", NVME + ["--update", "speculate"]),
    ("fp32", "NVMe, micro-batch-major", NVME + ["--update", "chase", "--accumulate", "micro"]),
    ("bf16", "no offload, serial", HOST + ["--update", "serial"]),
    ("bf16", "memory, split", DISCRETE + HOST + ["--update", "split"]),
    ("bf16", "NVMe, speculate", NVME + ["--update", "speculate"]),
    ("8bit", "no offload, serial", HOST + ["--update", "serial"]),
    ("8bit", "memory, chase", DISCRETE + HOST + ["--update", "chase"]),
    ("8bit", "NVMe, speculate", NVME + ["--update", "speculate"]),
]
SMALL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 256,
         "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
         "initializer_range": 0.02, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 1}
COLOURS = {"fp32": "#000000", "bf16": "#0072b2", "8bit": "#d55e00"}


def digest_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for piece in iter(lambda: f.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def call(command):
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit("%s\n%s" % (" ".join(command), run.stderr.strip()))


def make_model(args):
    """A folder with random weights, the same for every run of this work folder."""
    model = os.path.join(args.work, "model")
    if not os.path.exists(os.path.join(model, "model.safetensors")):
        shutil.rmtree(model, ignore_errors=True)
        config = os.path.join(args.work, "config.json")
        with open(config, "w") as f:
            json.dump(SMALL, f)
        call([args.stoker, "init", "--config", config, "--out", model, "--seed", "1"])
    return model


def options_of(args, kind, seed, placement):
    return ["--steps", str(args.steps), "--seq", str(args.seq), "--batch", str(args.batch), "--micro-batch", str(max(1, args.batch // 2)),
            "--lr", str(args.lr), "--schedule", "cosine", "--warmup", str(min(10, args.steps)), "--beta2", "0.99", "--clip", str(args.clip),
            "--seed", str(seed), "--moments", kind] + placement


def one(args, options):
    """The result of one run: from the work folder if it is there."""
    name = hashlib.sha256(json.dumps([options, args.identity]).encode()).hexdigest()[:16]
    kept, folder = os.path.join(args.work, name + ".json"), os.path.join(args.work, "run")
    if os.path.exists(kept):
        with open(kept) as f:
            return json.load(f)
    out, nvme, log = (os.path.join(folder, x) for x in ("out", "nvme", "log.jsonl"))
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(nvme)
    placed = ["--nvme", nvme] if "nvme" in options else []
    call([args.stoker, "train", "--model", args.model, "--data", args.data, "--eval-data", args.heldout, "--out", out, "--log", log,
          "--progress", "none", "--predict", "off"] + placed + options)
    with open(log) as f:
        lines = [json.loads(x) for x in f]
    result = {"loss": [x["loss"] for x in lines], "grad_norm": [x["grad_norm"] for x in lines],
              "heldout": [x["eval_loss"] for x in lines if "eval_loss" in x][-1], "sha256": digest_of(os.path.join(out, "model.safetensors")),
              "bound": sum(x["clip_factor"] < 1 for x in lines), "speculated": sum(x.get("spec_chunks", 0) for x in lines),
              "undone": sum(x.get("spec_undone", 0) for x in lines), "seconds": sum(x["step_s"] for x in lines)}
    with open(kept + ".part", "w") as f:
        json.dump(result, f)
    os.rename(kept + ".part", kept)
    shutil.rmtree(folder)
    return result


def smooth(v, n=20):
    """Mean of the last n values at each step."""
    return [sum(v[max(0, i + 1 - n):i + 1]) / min(n, i + 1) for i in range(len(v))]


class Panel:
    """A rectangle of the picture with its axis."""

    def __init__(self, parts, top, height, low, high, steps, title):
        self.parts, self.top, self.height, self.low, self.steps = parts, top, height, low, steps
        self.span = (high - low) or 1.0
        for k in range(5):
            value = low + k / 4 * self.span
            y = self.y(value)
            parts.append('<line x1="60" x2="890" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="6" y="%.1f">%.3g</text>' % (y, y, y + 4, value))
        parts.append('<text x="64" y="%d" font-weight="bold">%s</text>' % (top - 6, title))

    def y(self, value):
        return self.top + self.height * (1 - (value - self.low) / self.span)

    def line(self, values, colour, width, dash=""):
        points = " ".join("%.1f,%.1f" % (60 + 830 * i / max(1, self.steps - 1), self.y(v)) for i, v in enumerate(values))
        self.parts.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="%g"%s/>' %
                          (points, colour, width, ' stroke-dasharray="%s"' % dash if dash else ""))


def plot(args, exact, curves, heldout, path):
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 640" font-family="sans-serif" font-size="12">',
             '<rect width="900" height="640" fill="white"/>']
    every = [y for c in curves.values() for y in c["loss"]]
    upper = Panel(parts, 30, 330, min(every), max(every), args.steps,
                  "loss of each step; fp32 moments: %d runs of other placements and update modes, one curve to the bit" % exact)
    for kind in reversed(KINDS):  # fp32 lies on top, thin
        upper.line(curves[kind]["loss"], COLOURS[kind], {"fp32": 1.2, "bf16": 3, "8bit": 3}[kind])
    away = {k: [a - b for a, b in zip(smooth(curves[k]["loss"]), smooth(curves["fp32"]["loss"]))] for k in KINDS[1:]}
    most = max([abs(x) for v in away.values() for x in v] + [1e-4])
    lower = Panel(parts, 410, 170, -most, most, args.steps, "difference from fp32, mean of the last 20 steps")
    for kind in KINDS[1:]:
        lower.line(away[kind], COLOURS[kind], 2)
    for i, kind in enumerate(KINDS):
        parts.append('<rect x="560" y="%d" width="12" height="12" fill="%s"/><text x="578" y="%d">moments %s; held-out %s</text>' %
                     (44 + 20 * i, COLOURS[kind], 55 + 20 * i, kind, ", ".join("%.4f" % x for x in heldout[kind])))
    parts.append('<text x="64" y="612">step, of %d; %d sequences of %d tokens a step; held-out: at the end, one for each seed</text>' %
                 (args.steps, args.batch, args.seq))
    parts.append("</svg>")
    with open(path, "w") as f:
        f.write("\n".join(parts) + "\n")


def table(args, rows, heldout, verdict, path):
    lines = ["# Convergence", "", "`python3 bench/convergence.py --steps %d --seeds %d`: %d x %d tokens a step, clip %g." %
             (args.steps, args.seeds, args.batch, args.seq, args.clip), "",
             "| moments | run | last loss | steps with a binding clip | chunks speculated, taken back | weights | equal |", "|---|---|---|---|---|---|---|"]
    for kind, name, r, equal in rows:
        lines.append("| %s | %s | %.6f | %d | %d, %d | `%s` | %s |" % (kind, name, r["loss"][-1], r["bound"], r["speculated"], r["undone"],
                                                                  r["sha256"][:16], "yes" if equal else "**NO**"))
    lines += ["", "| moments | held-out loss at the end, by seed | mean | from fp32 |", "|---|---|---|---|"]
    mean = {k: sum(v) / len(v) for k, v in heldout.items()}
    for kind in KINDS:
        lines.append("| %s | %s | %.4f | %+.4f |" % (kind, ", ".join("%.4f" % x for x in heldout[kind]), mean[kind], mean[kind] - mean["fp32"]))
    lines += ["", verdict, "", "![curves](%s.svg)" % os.path.basename(args.out)]
    with open(path, "w") as f:
        f.write("\n".join(lines) + "\n")


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stoker", default="build/stoker")
    p.add_argument("--demo", default="demo-out")
    p.add_argument("--model")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--clip", type=float, default=2.0)
    p.add_argument("--work", default="convergence-work")
    p.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "convergence"))
    args = p.parse_args()
    args.data, args.heldout = (os.path.join(args.demo, x + ".safetensors") for x in ("train", "heldout"))
    for path in (args.data, args.heldout):
        if not os.path.exists(path):
            sys.exit("%s is missing: run ./dev demo first, or name its folder with --demo" % path)
    os.makedirs(args.work, exist_ok=True)
    args.model = args.model or make_model(args)
    args.identity = [digest_of(x) for x in (args.stoker, args.data, args.heldout, os.path.join(args.model, "model.safetensors"))]
    return args


def main():
    args = arguments()
    rows, first, same, seconds = [], {}, True, 0.0
    for kind, name, options in RUNS:
        r = one(args, options_of(args, kind, 0, options))
        f = first.setdefault(kind, r)
        equal = all(r[x] == f[x] for x in ("loss", "grad_norm", "sha256"))
        same, seconds = same and equal, seconds + r["seconds"]
        rows.append((kind, name, r, equal))
        print("%-4s  %-26s last loss %.6f  weights %s  %s%s" % (kind, name, r["loss"][-1], r["sha256"][:16], "equal" if equal else "DIFFERENT",
              "  %d chunks speculated, %d taken back" % (r["speculated"], r["undone"]) if r["speculated"] else ""), flush=True)
    heldout = {k: [first[k]["heldout"]] for k in KINDS}
    for seed in range(1, args.seeds):
        for kind in KINDS:
            r = one(args, options_of(args, kind, seed, HOST + ["--update", "chase"]))
            heldout[kind].append(r["heldout"])
            seconds += r["seconds"]
            print("%-4s  seed %d: held-out loss %.4f" % (kind, seed, r["heldout"]), flush=True)
    mean = {k: sum(v) / len(v) for k, v in heldout.items()}
    allowed = max(max(heldout["fp32"]) - min(heldout["fp32"]), 0.005 * mean["fp32"])
    far = {k: abs(mean[k] - mean["fp32"]) for k in KINDS[1:]}
    within = all(x <= allowed for x in far.values())
    verdict = "Within a kind every bit is %s. From fp32's mean held-out loss: %s; allowed %.4f (spread of fp32's own seeds, at least 0.5 %%): %s." % (
        "equal" if same else "NOT equal", ", ".join("%s %.4f" % x for x in far.items()), allowed, "within" if within else "NOT within")
    print(verdict)
    print("%.0f s of steps" % seconds)
    plot(args, sum(k == "fp32" for k, _, _, _ in rows), first, heldout, args.out + ".svg")
    table(args, rows, heldout, verdict, args.out + ".md")
    with open(args.out + ".json", "w") as f:
        json.dump({"steps": args.steps, "batch": args.batch, "seq": args.seq, "lr": args.lr, "clip": args.clip, "equal": same, "within": within,
                   "allowed": allowed, "heldout": heldout, "loss": {k: first[k]["loss"] for k in KINDS},
                   "runs": [{"moments": k, "run": n, "equal": e, **{x: r[x] for x in ("sha256", "bound", "speculated", "undone", "seconds")}}
                            for k, n, r, e in rows]}, f, indent=1)
    return 0 if same and within else 1


if __name__ == "__main__":
    sys.exit(main())
