#!/usr/bin/env python3
"""stoker beside its peers, on this machine, in one run: what `./dev bench` calls.

    python3 bench/peers.py --stoker build/stoker --python PYTHON [--what adam,nvme,step,step_nvme] [--minutes 30] [--dir DIR] [--out bench/results]

--python is an interpreter with torch, transformers and deepspeed (`./dev bench` makes one in a throw-away environment). Each comparison alternates
stoker and the peer until the 95 % interval of the median ratio is within 2 % or its share of --minutes is over:

adam       stoker bench adam beside DeepSpeed's CPU Adam and torch's fused AdamW (bench/adam_peers.py)
nvme       stoker bench nvme beside fio and DeepSpeed's async I/O, the store beside plain transfers (bench/nvme_pairs.py)
step       a training step of 207M parameters, 2 x 512 tokens, states in memory, beside DeepSpeed ZeRO-3 offload and plain torch bf16
step_nvme  the same with all state on NVMe, beside DeepSpeed's NVMe mode; clip not binding (100), and binding (1)

Writes OUT/<date>-<cpu>.md, a table with medians, intervals, numbers of pairs and versions, and the same as .json; prints the table. A comparison that
could not be made is a row that says why. Stopped (Ctrl-C, SIGTERM), it writes and prints what was made until then. Exit code 1 if a comparison that
was made misses its floor (the issue's or design's; the table has them), 130 when stopped.
"""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))

LLAMA_207M = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
              "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
              "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}


def output_of(command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def cpu_name():
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def memory_gib():
    with open("/proc/meminfo") as f:
        return int(f.readline().split()[1]) / (1 << 20)


def versions(args):
    found = {"stoker": output_of([args.stoker, "--version"]), "commit": output_of(["git", "-C", HERE, "describe", "--always", "--dirty"]),
             "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory_gib(), 1), "kernel": platform.release(),
             "fio": output_of(["fio", "--version"]), "python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers"):
        code = "from importlib.metadata import version; print(version('%s'))" % name
        found[name] = output_of([args.python, "-c", code]) if args.python else ""
    return found


class Runner:
    def __init__(self, args, folder):
        self.args, self.folder, self.rows = args, folder, []
        self.python_path = os.path.dirname(os.path.abspath(args.python)) if args.python else None

    def lines(self, title, command):
        """JSON lines of a script. Its log goes to stderr as it comes; a failure becomes a row."""
        print("== %s" % title, file=sys.stderr, flush=True)
        env = dict(os.environ, DS_ACCELERATOR="cpu")
        if self.python_path:
            env["PATH"] = self.python_path + os.pathsep + env.get("PATH", "")
        found = []
        with tempfile.TemporaryFile("w+", dir=self.folder) as errors:  # a pipe would fill while stdout is read
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True)
            try:
                for line in run.stdout:
                    if line.startswith("{"):
                        found.append(json.loads(line))
                        print("   " + line.rstrip()[:160], file=sys.stderr, flush=True)
                run.wait()
            except BaseException:  # stopped: the script and what it runs end, too
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
                pairs = [x["ratio"] for x in found if x.get("ratio") and not x.get("summary")]
                self.rows.append({"what": title, "missing": "stopped%s" % (", its pairs: " + ", ".join("%.2f" % x for x in pairs) if pairs else "")})
                raise
            errors.seek(0)
            why = errors.read().strip()
        if not any(x.get("summary") for x in found):
            last = why.splitlines()[-1] if why else "it ended with code %d and no summary" % run.returncode
            self.rows.append({"what": title, "missing": last})
        return found

    def add(self, what, x, note=""):
        self.rows.append({"what": what, "median": x["median_ratio"], "low": x["low"], "high": x["high"], "pairs": x["pairs"], "floor": x.get("floor"),
                          "met": x.get("met"), "note": note})

    def adam(self, seconds):
        for x in self.lines("adam", [sys.executable, os.path.join(HERE, "adam_peers.py"), "--stoker", self.args.stoker, "--python", self.args.python,
                                     "--seconds-max", str(seconds)]):
            if x.get("summary"):
                self.add("Adam, 64M parameters: " + x.get("what", ""), x)

    def nvme(self, seconds):
        command = [sys.executable, os.path.join(HERE, "nvme_pairs.py"), "--dir", self.folder, "--stoker", self.args.stoker, "--store-pairs",
                   os.path.join(os.path.dirname(self.args.stoker), "bench", "store_pairs"), "--run", "1", "--seconds-max", str(seconds / 16)]
        if self.args.python:
            command += ["--python", self.args.python]
        for x in self.lines("nvme", command):
            if x.get("summary"):
                self.add("NVMe %s, %s x %s, %s" % (x["mode"], x["block"], x["depth"], x["what"]), x,
                         "%.0f against %.0f MB/s" % (x["ours_median"] / 1e6, x["theirs_median"] / 1e6))

    def model(self):
        folder = os.path.join(self.folder, "model")
        if not os.path.exists(folder):
            config = os.path.join(self.folder, "config.json")
            with open(config, "w") as f:
                json.dump(LLAMA_207M, f)
            subprocess.run([self.args.stoker, "init", "--config", config, "--seed", "0", "--out", folder], check=True, stdout=subprocess.DEVNULL)
        return folder

    def step_pairs(self, title, mode, floor, seconds, options, clip="1.0"):
        peer = "%s %s %s 2 512 --clip %s --dir %s" % (self.args.python, os.path.join(HERE, "peers", "step.py"), mode, clip, self.folder)
        command = [sys.executable, os.path.join(HERE, "step_peers.py"), "--stoker", self.args.stoker, "--model", self.model(), "--dir", self.folder,
                   "--peer", peer, "--pairs", "60", "--seconds-max", str(seconds), "--floor", str(floor), "--", "--clip", clip] + options
        for x in self.lines(title, command):
            if x.get("summary"):
                self.add(title, x, "%.0f against %.0f tok/s; %.2f against %.2f GB" %
                         (x["ours_median"], x["theirs_median"], x["ours_peak_bytes"] / 1e9, x["theirs_peak_bytes"] / 1e9))

    def step(self, seconds):
        host = ["--params", "host", "--optimizer-state", "host", "--grads", "host"]
        self.step_pairs("207M, 2 x 512, states in memory, against DeepSpeed ZeRO-3 offload", "ds_cpu", 3.0, seconds / 2, host)
        self.step_pairs("207M, 2 x 512, states in memory, against torch bf16", "torch_bf16", 1.5, seconds / 2, host)

    def step_nvme(self, seconds):
        nvme = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme", "--host-memory", "1.1GB"]
        for clip, floor in (("100", 3.0), ("1.0", 2.4)):
            self.step_pairs("207M, 2 x 512, all state on NVMe, clip %s, against DeepSpeed on NVMe" % clip, "ds_nvme", floor, seconds / 2, nvme, clip)


def table(rows, info):
    text = ["# stoker beside its peers", "",
            "Ratios are stoker's rate over the peer's, both sides alternating in one run; the interval is that of the median, 95 %.", "",
            "| what | median | interval | pairs | floor | | |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        if "missing" in r:
            text.append("| %s | not measured: %s | | | | | |" % (r["what"], re.sub(r"\s+", " ", r["missing"])[:160]))
            continue
        verdict = "" if r["floor"] is None else "met" if r["met"] else "MISSED"
        text.append("| %s | %.3f | %.3f - %.3f | %d | %s | %s | %s |" %
                    (r["what"], r["median"], r["low"], r["high"], r["pairs"], "" if r["floor"] is None else r["floor"], verdict, r["note"]))
    text += ["", "| | |", "|---|---|"] + ["| %s | %s |" % (k, v or "not installed") for k, v in info.items()] + [""]
    return "\n".join(text)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stoker", required=True)
    p.add_argument("--python")
    p.add_argument("--what", default="adam,nvme,step,step_nvme")
    p.add_argument("--minutes", type=float, default=30)
    p.add_argument("--dir")
    p.add_argument("--out", default=os.path.join(HERE, "results"))
    args = p.parse_args()
    args.stoker = os.path.abspath(args.stoker)
    known = ("adam", "nvme", "step", "step_nvme")
    chosen = args.what.split(",")
    for what in chosen:
        if what not in known:
            p.error("--what %s: there are %s" % (what, ", ".join(known)))
        if what != "nvme" and not args.python:
            p.error("--what %s needs --python, an interpreter with torch, transformers and deepspeed" % what)
    info = versions(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopped = False
    with tempfile.TemporaryDirectory(prefix="stoker-peers-", dir=args.dir) as folder:
        runner = Runner(args, folder)
        try:
            for what in chosen:
                getattr(runner, what)(args.minutes * 60 / len(chosen))
        except KeyboardInterrupt:
            stopped = True
    os.makedirs(args.out, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|cpu|processor|@.*", "", info["cpu"].lower())).strip("-")
    base = os.path.join(args.out, "%s-%s" % (datetime.date.today().isoformat(), slug))
    text = table(runner.rows, info)
    with open(base + ".md", "w") as f:
        f.write(text)
    with open(base + ".json", "w") as f:
        json.dump({"rows": runner.rows, "versions": info}, f, indent=1)
    print(text)
    print("written to %s.md and .json" % os.path.relpath(base))
    if stopped:
        return 130
    return 1 if any(r.get("met") is False for r in runner.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
