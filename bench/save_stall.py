#!/usr/bin/env python3
"""What a checkpoint beside the steps costs them, and what one between them costs.

    python3 bench/save_stall.py --stoker build/stoker --model DIR [--steps 25] [--every 3] [--seq 512] [--batch 2] [--dir D] [-- options for train]

One run with --checkpoint async: steps that have a checkpoint beside them alternate with steps that have none. A step's time is wall clock from the line
of the step before to its own, so that beginning a checkpoint counts. Each step with one is compared with the mean of its nearest steps without, before
and after. Then one run with --checkpoint sync, whose checkpoints say themselves how long the run waited. Prints one JSON line.
  extra_share     what all steps beside one checkpoint take longer, as a share of a step without one: median and quartiles over checkpoints
  held_share      the part of it in which updates waited for the checkpoint (the engine's own count)
  sync_share      what a checkpoint between the steps takes, as a share of a step
"""
import argparse, json, os, random, re, statistics, struct, subprocess, sys, tempfile


def train(args, more, work, mode):
    log, out = os.path.join(work, mode + ".jsonl"), os.path.join(work, mode)
    command = [args.stoker, "train", "--model", args.model, "--data", os.path.join(work, "data.bin"), "--out", out, "--steps", str(args.steps),
               "--seq", str(args.seq), "--batch", str(args.batch), "--micro-batch", str(args.batch), "--lr", "1e-4", "--log", log, "--progress", "none",
               "--checkpoint", mode, "--checkpoint-every", str(args.every), "--keep-checkpoints", "1"]
    run = subprocess.run(command + more, capture_output=True, text=True)
    if run.returncode:
        sys.exit("stoker failed: " + run.stderr.strip())
    with open(log) as f:
        return [json.loads(line) for line in f], run.stdout


def quartiles(v):
    v = sorted(v)
    return [round(statistics.median(v), 4), round(v[len(v) // 4], 4), round(v[(3 * len(v)) // 4], 4)] if v else None


def beside(args, steps):
    wall = {b["step"]: b["elapsed_s"] - a["elapsed_s"] for a, b in zip(steps, steps[1:])}
    begun = lambda k: k % args.every == 0 and k != args.steps
    saving = {s["step"]: s["saving"] for s in steps}
    held = {s["step"]: s["save_wait_s"] for s in steps}
    loaded = [k for k in wall if begun(k - 1) or saving.get(k - 1)]
    free = [k for k in wall if k not in loaded and k > args.warmup]
    extra, share, spans = [], [], []
    for first in [k for k in loaded if begun(k - 1) and k > args.warmup]:
        span = [first]
        while span[-1] + 1 in loaded and not begun(span[-1]):
            span.append(span[-1] + 1)
        near = [x for x in ([k for k in free if k < first][-1:] + [k for k in free if k > span[-1]][:1])]
        if len(near) < 2:
            continue
        base = statistics.mean(wall[k] for k in near)
        extra.append(sum(wall[k] - base for k in span) / base)
        share.append(sum(held[k] for k in span) / base)
        spans.append(len(span))
    return {"step_s": round(statistics.median(wall[k] for k in free), 4), "checkpoints": len(extra), "steps_beside_one": statistics.mean(spans),
            "extra_share": quartiles(extra), "held_share": quartiles(share)}


def main():
    own, more = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1:]
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--stoker", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--every", type=int, default=3)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--sync-steps", type=int, default=0, help="of the run with --checkpoint sync; 0: half as many")
    p.add_argument("--dir", help="folder for the run's files; default: a temporary one")
    args = p.parse_args(own)
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        vocab = json.load(open(os.path.join(args.model, "config.json")))["vocab_size"]
        r = random.Random(1)
        with open(os.path.join(work, "data.bin"), "wb") as f:
            f.write(b"".join(struct.pack("<H", r.randrange(min(vocab, 65536))) for _ in range((args.steps + 2) * args.seq * args.batch)))
        steps, text = train(args, more, work, "async")
        took = [float(x) for x in re.findall(r"  ([0-9.]+) s beside the steps", text)]
        result = {"bench": "save_stall", **beside(args, steps), "took_s": quartiles(took), "options": more}
        args.steps = args.sync_steps or args.steps // 2
        steps, text = train(args, more, work, "sync")
        waited = [float(x) for x in re.findall(r"  ([0-9.]+) s, the run waited", text)]
        result["sync_s"] = quartiles(waited)
        result["sync_share"] = [round(x / result["step_s"], 4) for x in quartiles(waited)] if waited else None
        print(json.dumps(result))


if __name__ == "__main__":
    main()
