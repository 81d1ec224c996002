#!/usr/bin/env python3
"""Tokens per second of a whole training step, stoker and a peer alternating on one machine.

    python3 bench/step_peers.py --stoker build/stoker --model DIR --peer 'python step.py ds_cpu 2 512' [--pairs 3]
                                [--seq 512] [--batch 2] [--seconds-max 0] [--floor X] [-- more options for stoker train]

The peer is a command that prints `NN tok/s` and `maxrss X GB` on its last lines (bench/peers/step.py does). Each pair runs both, in turn first; the
first steps of a run (warm-up) are not counted: the median of the rest is a run's rate. After at least 3 pairs it stops when the 95 % interval of the
median ratio (percentile bootstrap) is within 2 % of the median on either side, at --pairs, or when --seconds-max has passed. Prints one JSON line a run
and a last one ("summary": true) with the median ratio, its interval and whether the floor is met. Only ratios of one run of this script mean anything:
machines drift.
"""
import argparse, json, os, random, re, shlex, shutil, statistics, struct, subprocess, sys, tempfile, time

from interval import interval

PAIRS_MIN = 3


def enough(ratios, begin, args):
    if len(ratios) >= args.pairs or (args.seconds_max and ratios and time.monotonic() - begin > args.seconds_max):
        return True
    if len(ratios) < PAIRS_MIN:
        return False
    low, high = interval(ratios)
    middle = statistics.median(ratios)
    return max(high - middle, middle - low) <= 0.02 * middle


def stoker_run(args, more, work):
    log = os.path.join(work, "log.jsonl")
    out = os.path.join(work, "out")
    nvme = os.path.join(work, "nvme")
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(nvme, exist_ok=True)
    command = [args.stoker, "train", "--model", args.model, "--data", os.path.join(work, "data.bin"), "--out", out, "--steps", str(args.steps),
               "--seq", str(args.seq), "--batch", str(args.batch), "--micro-batch", str(args.batch), "--lr", "1e-4", "--log", log, "--progress", "none"]
    if "nvme" in more:
        command += ["--nvme", nvme]
    run = subprocess.run(command + more, capture_output=True, text=True)
    if run.returncode:
        sys.exit("stoker failed: " + run.stderr.strip())
    with open(log) as f:
        steps = [json.loads(line) for line in f]
    counted = steps[args.warmup:]
    return {"who": "stoker", "tokens_per_s": statistics.median(s["tokens_per_s"] for s in counted),
            "peak_rss_bytes": max(s["peak_rss_bytes"] for s in steps), "loss": steps[-1]["loss"], "steps_counted": len(counted)}


def peer_run(args):
    run = subprocess.run(shlex.split(args.peer), capture_output=True, text=True)
    text = run.stdout + run.stderr
    rate = re.findall(r"([0-9.]+) tok/s", text)
    rss = re.findall(r"maxrss ([0-9.]+) GB", text)
    if run.returncode or not rate:
        sys.exit("the peer failed:\n" + text[-2000:])
    return {"who": "peer", "tokens_per_s": float(rate[-1]), "peak_rss_bytes": float(rss[-1]) * 1e9 if rss else None}


def main():
    own, more = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1:]
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--stoker", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--peer", required=True)
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warmup", type=int, default=1)
    p.add_argument("--seconds-max", type=float, default=0)
    p.add_argument("--floor", type=float)
    p.add_argument("--dir", help="folder for the run's files; default: a temporary one")
    args = p.parse_args(own)
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        vocab = json.load(open(os.path.join(args.model, "config.json")))["vocab_size"]
        r = random.Random(1)
        with open(os.path.join(work, "data.bin"), "wb") as f:
            f.write(b"".join(struct.pack("<H", r.randrange(min(vocab, 65536))) for _ in range(args.steps * args.seq * args.batch)))
        ratios, ours, theirs, begin = [], [], [], time.monotonic()
        while not enough(ratios, begin, args):
            first_stoker = len(ratios) % 2 == 0
            a = stoker_run(args, more, work) if first_stoker else None
            b = peer_run(args)
            a = a or stoker_run(args, more, work)
            for x in (a, b):
                print(json.dumps({"bench": "step_peers", "pair": len(ratios), **x}), flush=True)
            ratios.append(a["tokens_per_s"] / b["tokens_per_s"])
            print(json.dumps({"bench": "step_peers", "pair": len(ratios) - 1, "ratio": ratios[-1]}), flush=True)
            ours.append(a)
            theirs.append(b)
        low, high = interval(ratios)
        met = args.floor is None or high >= args.floor
        print(json.dumps({"bench": "step_peers", "summary": True, "pairs": len(ratios), "median_ratio": statistics.median(ratios), "low": low, "high": high,
                          "floor": args.floor, "met": met, "min_ratio": min(ratios), "max_ratio": max(ratios), "options": more, "peer": args.peer,
                          "ours_median": statistics.median(x["tokens_per_s"] for x in ours),
                          "theirs_median": statistics.median(x["tokens_per_s"] for x in theirs),
                          "ours_peak_bytes": max(x["peak_rss_bytes"] for x in ours),
                          "theirs_peak_bytes": max(x["peak_rss_bytes"] or 0 for x in theirs)}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
