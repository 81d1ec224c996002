#!/usr/bin/env python3
"""Predicted against measured: runs `stoker train` in several configurations and compares what it predicted with what its steps took.

    python3 bench/predict_check.py --stoker build/stoker --dir FOLDER [--config FILE] [--steps 6] [--only NAMES] [--afterwards] [--json F]

The model is made once in FOLDER (a Llama of 207M parameters unless --config names another), the state on NVMe lies there too. Each run
predicts before its first step: it measures the machine for a second or two, tries one visit of each kind, and runs the plan on these figures.
Measured is the median of the steps after the first. Nothing in the predictor is fitted to these runs. Prints a line a configuration, and a
last one with the largest errors, and with how many are within 10 % of time and 2 % of memory. Needs a quiet machine: a run beside which other
processes took more than --others percent of the cores is printed as disturbed, does not count and is repeated, at most --tries times.
--afterwards: the configurations that were chosen when the model was done, instead of those it was made on.
"""
import argparse, json, os, random, re, resource, shutil, struct, subprocess, sys

MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2816,
         "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}

RAM = ["--params", "host", "--optimizer-state", "host", "--grads", "host"]
NVME = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]
CONFIGS = {  # name: (seq, batch, micro-batch, uses NVMe, options)
    "ram-chase": (512, 2, 2, False, RAM + ["--update", "chase"]),
    "ram-serial": (512, 1, 1, False, RAM + ["--update", "serial"]),
    "ram-recompute": (256, 4, 4, False, RAM + ["--activations", "recompute"]),
    "ram-4-micro": (256, 4, 1, False, RAM),
    "discrete": (512, 2, 2, False, RAM + ["--device", "host:discrete", "--device-memory", "3GiB"]),
    "opt-nvme": (512, 2, 2, True, ["--params", "host", "--optimizer-state", "nvme", "--grads", "host"]),
    "all-nvme": (512, 2, 2, True, NVME),
    "nvme-recompute": (512, 4, 2, True, NVME + ["--activations", "recompute"]),
    "nvme-buffer": (512, 2, 1, True, NVME + ["--nvme-buffer", "1GiB"]),
    "nvme-serial": (256, 2, 2, True, NVME + ["--update", "serial"]),
}

BUDGET = ["--host-memory", "1500MB"]
OPT = ["--params", "host", "--optimizer-state", "nvme", "--grads", "host"]
AFTERWARDS = {
    "ram-chase-micro-1": (512, 2, 1, False, RAM + ["--update", "chase"]),
    "ram-speculate-keep": (256, 8, 4, False, RAM + ["--update", "speculate", "--activations", "keep"]),
    "ram-split": (512, 4, 2, False, RAM + ["--update", "split"]),
    "opt-nvme-recompute": (512, 4, 2, True, OPT + ["--update", "chase", "--activations", "recompute"]),
    "opt-nvme-serial": (768, 2, 2, True, OPT + ["--update", "serial"]),
    "nvme-speculate": (512, 4, 1, True, NVME + ["--update", "speculate"]),
    "nvme-speculate-clip-100": (512, 4, 1, True, NVME + ["--update", "speculate", "--clip", "100"]),
    "nvme-serial-recompute": (256, 8, 2, True, NVME + ["--update", "serial", "--activations", "recompute"]),
    "nvme-1.5-GB": (512, 2, 2, True, NVME + BUDGET + ["--update", "chase"]),
    "nvme-acts-nvme": (384, 4, 2, True, NVME + ["--activations", "nvme"]),
    "nvme-chase-micro-4": (512, 8, 4, True, NVME + ["--update", "chase"]),
}


def prepare(args):
    os.makedirs(args.dir, exist_ok=True)
    model, data = os.path.join(args.dir, "model"), os.path.join(args.dir, "data.bin")
    if not os.path.isdir(model):
        config = os.path.join(args.dir, "config.json")
        with open(config, "w") as f:
            json.dump(json.load(open(args.config)) if args.config else MODEL, f)
        subprocess.run([args.stoker, "init", "--config", config, "--out", model], check=True, stdout=subprocess.DEVNULL)
    if not os.path.exists(data):
        r = random.Random(1)
        with open(data, "wb") as f:
            f.write(b"".join(struct.pack("<H", r.randrange(30000)) for _ in range(args.steps * 8192)))
    return model, data


def busy_s():
    """Seconds of all cores that were not idle, since boot."""
    with open("/proc/stat") as f:
        v = [int(x) for x in f.readline().split()[1:9]]
    return (sum(v) - v[3] - v[4]) / os.sysconf("SC_CLK_TCK"), sum(v) / os.sysconf("SC_CLK_TCK")


def own_s():
    return sum(u.ru_utime + u.ru_stime for u in (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)))


def run(args, name, model, data):
    seq, batch, micro, nvme, options = (CONFIGS | AFTERWARDS)[name]
    out, disk = os.path.join(args.dir, "out"), os.path.join(args.dir, "nvme")
    shutil.rmtree(out, ignore_errors=True)
    command = [args.stoker, "train", "--model", model, "--data", data, "--out", out, "--steps", str(args.steps), "--seq", str(seq), "--batch",
               str(batch), "--micro-batch", str(micro), "--lr", "1e-4", "--progress", "none"] + options
    if nvme:
        os.makedirs(disk, exist_ok=True)
        command += ["--nvme", disk]
    busy, total, own = *busy_s(), own_s()
    done = subprocess.run(command, capture_output=True, text=True)
    others = 100 * (busy_s()[0] - busy - own_s() + own) / (busy_s()[1] - total)
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        sys.exit("%s failed: %s" % (name, done.stderr.strip()))
    rows = dict((k.strip(), (float(a), float(b))) for k, a, b in
                re.findall(r"^  (step|compute|waits: \w+|other) +([0-9.]+) s +([0-9.]+) s", done.stdout, re.M))
    memory = re.search(r"^  peak memory .* ([+-][0-9.]+) %$", done.stdout, re.M)
    if "step" not in rows or not memory:
        sys.exit("%s was not predicted:\n%s" % (name, done.stdout[-1500:]))
    p, m = rows["step"]
    return {"bench": "predict_check", "config": name, "seq": seq, "batch": batch, "micro_batch": micro, "options": options, "steps": args.steps - 1,
            "predicted_s": p, "measured_s": m, "error_pct": round(100 * (p - m) / m, 2), "memory_error_pct": float(memory.group(1)),
            "others_pct": round(others, 1), "figures": {k: {"predicted_s": a, "measured_s": b} for k, (a, b) in rows.items()},
            "machine": (re.findall(r"^machine +(.*)$", done.stdout, re.M) or [""])[0]}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--stoker", required=True)
    p.add_argument("--dir", required=True)
    p.add_argument("--config")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--afterwards", action="store_true")
    p.add_argument("--only", help="names of configurations, separated by commas")
    p.add_argument("--others", type=float, default=4)
    p.add_argument("--tries", type=int, default=3)
    p.add_argument("--json", help="append the lines to this file")
    args = p.parse_args()
    model, data = prepare(args)
    names = args.only.split(",") if args.only else list(AFTERWARDS if args.afterwards else CONFIGS)
    results = []
    print("%-22s %10s %10s %8s %8s %8s" % ("config", "predicted", "measured", "error", "memory", "others"))
    for name in names:
        for _ in range(args.tries):
            r = run(args, name, model, data)
            r["disturbed"] = r["others_pct"] > args.others
            print("%-22s %8.3f s %8.3f s %+7.1f%% %+7.1f%% %7.1f%%%s" % (
                name, r["predicted_s"], r["measured_s"], r["error_pct"], r["memory_error_pct"], r["others_pct"],
                "  disturbed, does not count" if r["disturbed"] else ""), flush=True)
            if args.json:
                with open(args.json, "a") as f:
                    f.write(json.dumps(r) + "\n")
            if not r["disturbed"]:
                results.append(r)
                break
    missing = len(names) - len(results)
    if missing:
        print("%d of %d configurations were disturbed in every try, and do not count" % (missing, len(names)))
    if not results:
        sys.exit("every run was disturbed: others took more than %.1f %% of the cores (--others)" % args.others)
    print("largest error of time %.1f %%, of memory %.1f %%; within 10 %% of time %d, within 2 %% of memory %d, of %d" % (
        max(abs(r["error_pct"]) for r in results), max(abs(r["memory_error_pct"]) for r in results),
        sum(abs(r["error_pct"]) <= 10 for r in results), sum(abs(r["memory_error_pct"]) <= 2 for r in results), len(results)))


if __name__ == "__main__":
    main()
