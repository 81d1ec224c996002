"""What the tests of the command against tests/golden share: safetensors, cases, runs, TAP.

Needs Python's standard library only. Knows how golden files look (tests/golden/README.md) and how
the command is called; knows nothing of stoker's inside.
"""

import array
import concurrent.futures
import itertools
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GOLDEN = os.path.join(ROOT, "tests", "golden")
SOAK = os.environ.get("STK_SOAK", "") not in ("", "0")
RUN_S = 120  # of one call of the command: here a call takes a tenth of a second
TOGETHER = 2  # tests at a time: a call waits for its disk more than it computes

F32 = ["--activation-dtype", "f32", "--matmul", "f32"]


class Skip(Exception):
    """This machine cannot show it; the text says why."""


class Refused(Exception):
    """The command ended with another code than 0; the text is its sentence."""


# --- safetensors ------------------------------------------------------------------------------


class Tensor:
    def __init__(self, dtype, shape, raw):
        self.dtype, self.shape, self.raw = dtype, tuple(shape), raw

    def floats(self):
        """All elements, as an array of C floats or doubles."""
        if self.dtype == "BF16":
            wide = array.array("I", (x << 16 for x in array.array("H", self.raw)))
            return array.array("f", wide.tobytes())
        return array.array({"F32": "f", "F64": "d"}[self.dtype], self.raw)

    def scalar(self):
        (value,) = self.floats()
        return value


def read_file(path):
    with open(path, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
        data = f.read()
    header.pop("__metadata__", None)
    return {name: Tensor(t["dtype"], t["shape"], data[slice(*t["data_offsets"])])
            for name, t in header.items()}


def read_folder(folder):
    """All tensors of a Hugging Face folder, sharded or not."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_file(os.path.join(folder, "model.safetensors"))
    with open(index, encoding="utf-8") as f:
        shards = set(json.load(f)["weight_map"].values())
    tensors = {}
    for shard in sorted(shards):
        tensors.update(read_file(os.path.join(folder, shard)))
    return tensors


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def largest_difference(a, b):
    assert len(a) == len(b), "%d and %d elements" % (len(a), len(b))
    assert all(map(math.isfinite, a)), "not all finite"
    return max(abs(x - y) for x, y in zip(a, b))


# --- cases ------------------------------------------------------------------------------------


class Case:
    """A golden case: its folder, what golden.json says, the numbers of golden.safetensors."""

    def __init__(self, name):
        self.name, self.folder = name, os.path.join(GOLDEN, name)
        self.data = os.path.join(self.folder, "data.safetensors")
        self.about = read_json(os.path.join(self.folder, "golden.json"))
        self.numbers = read_file(os.path.join(self.folder, "golden.safetensors"))
        self.windows = self.about["windows"]

    def grads(self):
        """The gradients of transformers by the parameter's name."""
        return {n[len("grad."):]: t for n, t in self.numbers.items() if n.startswith("grad.")}

    def grad_of(self, name):
        """The gradient, and its largest absolute element."""
        want = self.numbers["grad." + name].floats()
        return want, max(map(abs, want))

    def model(self, config, place):
        """The model's folder with `config` as its config.json, made in the folder `place`."""
        if config == "config.json":
            return self.folder
        folder = os.path.join(place, "model_other")
        if not os.path.isdir(folder):
            os.mkdir(folder)
            for name in os.listdir(self.folder):
                if name.startswith("model") or name == "generation_config.json":
                    shutil.copy(os.path.join(self.folder, name), folder)
            shutil.copy(os.path.join(self.folder, config), os.path.join(folder, "config.json"))
        return folder


def cases():
    return sorted(n for n in os.listdir(GOLDEN)
                  if os.path.isfile(os.path.join(GOLDEN, n, "golden.json")))


# --- the command ------------------------------------------------------------------------------


class Stoker:
    def __init__(self, path):
        self.path = path
        # Threads that wait should not take the processor from those that compute.
        self.env = dict(os.environ, OMP_WAIT_POLICY="passive")

    def run(self, *args):
        """Runs the command; returns what it printed, raises Refused where it ends with an error."""
        done = subprocess.run([self.path, *map(str, args)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True, env=self.env,
                              timeout=RUN_S)
        if done.returncode != 0:
            raise Refused("stoker %s: code %d: %s" % (" ".join(map(str, args)), done.returncode,
                                                      done.stderr.strip()))
        return done.stdout

    def eval(self, case, model, place, *more):
        """Logits (Tensor) and mean loss over all windows of the case."""
        logits, result = os.path.join(place, "logits.safetensors"), os.path.join(place, "eval.json")
        self.run("eval", "--model", model, "--data", case.data, "--seq", case.about["seq"],
                 "--logits", logits, "--json", result, *more)
        return read_file(logits)["logits"], read_json(result)["loss"]

    def train(self, case, model, place, steps, *more, lr=None):
        """The golden run of so many steps; returns the log's lines and the folder it wrote."""
        out = tempfile.mkdtemp(prefix="out", dir=place)
        log = os.path.join(place, os.path.basename(out) + ".jsonl")
        about = case.about
        self.run("train", "--model", model, "--data", case.data, "--seq", about["seq"], "--out", out,
                 "--steps", steps, "--batch", case.windows, "--lr", about["lr"] if lr is None else lr, "--schedule",
                 "constant", "--weight-decay", about["weight_decay"], "--beta1", about["beta1"],
                 "--beta2", about["beta2"], "--eps", about["eps"], "--clip", about["clip"], "--log",
                 log, "--progress", "none", "--predict", "off", *more)
        with open(log, encoding="utf-8") as f:
            return [json.loads(line) for line in f], out

    def gradients(self, case, model, place, *more):
        """Gradients of the first step over all windows, by name, and that step's log line."""
        dump = tempfile.mkdtemp(prefix="grads", dir=place)
        lines, _ = self.train(case, model, place, 1, "--dump-gradients", dump, *more)
        (name,) = os.listdir(dump)
        return read_file(os.path.join(dump, name)), lines[0]


def on_nvme(place, training):
    """Options: a device with memory of its own, everything that may be swapped on `place`."""
    nvme = tempfile.mkdtemp(prefix="nvme", dir=place)
    more = ["--optimizer-state", "nvme", "--grads", "nvme"] if training else []
    return ["--device", "host:discrete", "--nvme", nvme, "--params", "nvme", *more]


# --- TAP --------------------------------------------------------------------------------------


def run_tests(tests, at_last=()):
    """Runs (name, function) pairs, each with a folder of its own, `at_last` after all others;
    prints TAP, returns the exit code."""
    print("1..%d" % (len(tests) + len(at_last)))
    failed, begin = 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        results = itertools.chain(pool.map(run_test, tests), map(run_test, at_last))
        for number, lines in enumerate(results, 1):
            failed += lines[-1].startswith("not ok")
            for line in lines:
                print(line % number if line is lines[-1] else line, flush=True)
    print("# %d failed, %.1f s" % (failed, time.monotonic() - begin))
    return 1 if failed else 0


def run_test(named):
    """The lines of one test; the last has a place for the test's number and no other %."""
    name, test = named
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-golden-") as place:
            note = test(place)
        line = "ok %d - " + (name + ("  # " + note if note else "")).replace("%", "%%")
        return [line]
    except Skip as why:
        return ["ok %d - " + ("%s # SKIP %s" % (name, why)).replace("%", "%%")]
    except Exception as wrong:  # one failure is not to hide the others
        known = isinstance(wrong, (AssertionError, Refused))
        text = str(wrong) if known and str(wrong) else traceback.format_exc()
        return ["# " + line for line in text.splitlines()] + ["not ok %d - " + name]
