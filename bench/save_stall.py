#!/usr/bin/env python3
"""What a checkpoint beside the steps costs them, what it must cost, and what one between them costs.

    python3 bench/save_stall.py --stoker build/stoker --model DIR [--steps 34] [--every 4] [--seq 512] [--batch 2] [--dir D] [--cases machine,1]
        [--floor build/bench/save_floor] [-- options for train]

A case is a number of compute threads (`machine`: as many as the machine has cores; 1: a core is free beside the computing, as on a machine whose GPU
computes). One run a case with --checkpoint async: steps that have a checkpoint beside them alternate with steps that have none. A step's time is wall
clock from the line of the step before to its own, so that beginning a checkpoint counts. Steps beside one checkpoint are compared with as many times
the mean of the nearest plain steps, before and after. Plain steps go through the same comparison (`nothing`): what the machine's noise alone gives.
Prints one JSON line a case:
  extra_share     what all steps beside one checkpoint take longer, as a share of a step without one: median and quartiles over checkpoints
  nothing_share   the same for plain steps
  held_share      the part of it in which updates waited for the checkpoint (the engine's own count)
  lane_cpu_s      processor time of the checkpoint's thread, one checkpoint
  floor_cpu_s     the least it could be: its bytes read once at the rate of one core, and handed to the drive in large requests past the page cache
                  (save_floor, right after the run on the same drive)
  floor_share     floor_cpu_s over all cores, as a share of a step: what is left where every core computes all the time; 0 where one is free
  sync_share      what a checkpoint between the steps takes, as a share of a step (a run of its own; --sync-steps 0: none)
"""
import argparse, json, os, random, re, statistics, struct, subprocess, sys, tempfile, threading


class LaneTime(threading.Thread):
    """Processor time of the thread `save` of a process, read until it ends; 0 where the kernel does not tell."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.ns, self.over = pid, 0, threading.Event()
        self.start()

    def run(self):
        tasks, path = "/proc/%d/task" % self.pid, None
        while not self.over.wait(0.2):
            try:
                for t in os.listdir(tasks) if path is None else []:
                    with open("%s/%s/comm" % (tasks, t)) as f:
                        if f.read().strip() == "save":
                            path = "%s/%s/schedstat" % (tasks, t)
                if path:
                    with open(path) as f:
                        self.ns = int(f.read().split()[0])
            except OSError:
                pass


def train(args, more, work, mode, steps):
    log, out = os.path.join(work, mode + ".jsonl"), os.path.join(work, mode)
    command = [args.stoker, "train", "--model", args.model, "--data", os.path.join(work, "data.bin"), "--out", out, "--steps", str(steps),
               "--seq", str(args.seq), "--batch", str(args.batch), "--micro-batch", str(args.batch), "--lr", "1e-4", "--log", log, "--progress", "none",
               "--checkpoint", mode, "--checkpoint-every", str(args.every), "--keep-checkpoints", "1"]
    run = subprocess.Popen(command + more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lane = LaneTime(run.pid)
    text, errors = run.communicate()
    lane.over.set()
    if run.returncode:
        sys.exit("stoker failed: " + errors.strip())
    with open(log) as f:
        lines = [json.loads(line) for line in f]
    os.remove(log)
    subprocess.run(["rm", "-rf", out], check=True)
    return lines, text, lane.ns / 1e9


def quartiles(v):
    v = sorted(v)
    return [round(statistics.median(v), 4), round(v[len(v) // 4], 4), round(v[(3 * len(v)) // 4], 4)] if v else None


def against(wall, span, plain):
    """(The span's time minus as many plain steps) over a plain step; None without one on both sides."""
    near = [k for k in plain if k < span[0]][-1:] + [k for k in plain if k > span[-1]][:1]
    if len(near) < 2:
        return None
    base = statistics.mean(wall[k] for k in near)
    return sum(wall[k] - base for k in span) / base


def beside(args, steps):
    wall = {b["step"]: b["elapsed_s"] - a["elapsed_s"] for a, b in zip(steps, steps[1:])}
    begun = lambda k: k % args.every == 0 and k != args.steps
    saving = {s["step"]: s["saving"] for s in steps}
    held = {s["step"]: s["save_wait_s"] for s in steps}
    loaded = [k for k in wall if begun(k - 1) or saving.get(k - 1)]
    free = [k for k in wall if k not in loaded and k > args.warmup]
    if len(free) < 3:
        sys.exit("no plain steps beside the checkpoints: give a larger --every")
    extra, share, spans = [], [], []
    for first in [k for k in loaded if begun(k - 1) and k > args.warmup]:
        span = [first]
        while span[-1] + 1 in loaded and not begun(span[-1]):
            span.append(span[-1] + 1)
        x = against(wall, span, free)
        if x is not None:
            extra.append(x)
            share.append(sum(held[k] for k in span) / statistics.median(wall[k] for k in free))
            spans.append(len(span))
    nothing = [against(wall, [k], [f for f in free if f != k]) for k in free]
    return {"step_s": round(statistics.median(wall[k] for k in free), 4), "checkpoints": len(extra),
            "steps_beside_one": round(statistics.mean(spans), 2) if spans else None, "extra_share": quartiles(extra),
            "nothing_share": quartiles([x for x in nothing if x is not None]), "held_share": quartiles(share)}


def floor(args, work):
    run = subprocess.run([args.floor, "--dir", work], capture_output=True, text=True)
    if run.returncode:
        sys.exit("save_floor failed: " + run.stderr.strip())
    return json.loads(run.stdout)


def one_case(args, more, work, case):
    options = more + ([] if case == "machine" else ["--threads", case])
    steps, text, cpu_s = train(args, options, work, "async", args.steps)
    took = [float(x) for x in re.findall(r"  ([0-9.]+) s beside the steps", text)]
    result = {"bench": "save_stall", "threads": case, **beside(args, steps), "took_s": quartiles(took), "options": options}
    result["lane_cpu_s"] = round(cpu_s / len(took), 4) if took and cpu_s else None
    if args.floor:
        gigabytes = 12e-9 * args.params
        least = floor(args, work)
        result["floor_cpu_s"] = round(least["cpu_s_per_GB"] * gigabytes, 4)
        cores = len(os.sched_getaffinity(0))
        result["floor_share"] = round(result["floor_cpu_s"] / cores / result["step_s"], 4) if case == "machine" or int(case) >= cores else 0
        result["floor"] = least
    if args.sync_steps:
        steps, text, _ = train(args, options, work, "sync", args.sync_steps)
        waited = [float(x) for x in re.findall(r"  ([0-9.]+) s, the run waited", text)]
        result["sync_s"] = quartiles(waited)
        result["sync_share"] = [round(x / result["step_s"], 4) for x in quartiles(waited)] if waited else None
    print(json.dumps(result), flush=True)


def parameters(model):
    """Of the model folder's safetensors files: elements in their headers."""
    n = 0
    for name in os.listdir(model):
        if name.endswith(".safetensors"):
            with open(os.path.join(model, name), "rb") as f:
                header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            for key, t in header.items():
                if key != "__metadata__":
                    size = 1
                    for d in t["shape"]:
                        size *= d
                    n += size
    return n


def main():
    own, more = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, more = own[:at], own[at + 1:]
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--stoker", required=True)
    p.add_argument("--floor", help="the program save_floor; default: none")
    p.add_argument("--model", required=True)
    p.add_argument("--cases", default="machine,1", help="numbers of compute threads")
    p.add_argument("--steps", type=int, default=34)
    p.add_argument("--every", type=int, default=4)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--sync-steps", type=int, default=0, help="of the run with --checkpoint sync; 0: none")
    p.add_argument("--dir", help="folder for the run's files; default: a temporary one")
    args = p.parse_args(own)
    args.params = parameters(args.model)
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        vocab = json.load(open(os.path.join(args.model, "config.json")))["vocab_size"]
        r = random.Random(1)
        with open(os.path.join(work, "data.bin"), "wb") as f:
            f.write(b"".join(struct.pack("<H", r.randrange(min(vocab, 65536))) for _ in range((args.steps + 2) * args.seq * args.batch)))
        for case in args.cases.split(","):
            one_case(args, more, work, case)


if __name__ == "__main__":
    main()
