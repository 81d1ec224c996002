"""What the tests of the command share: a temporary folder, tiny models and data, TAP output.

Standard library only.  A test is a function `test_*` that raises AssertionError; run_tests prints TAP.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import traceback

STOKER = os.environ.get("STOKER_BINARY", "build/stoker")
GOLDEN = os.environ.get("STK_GOLDEN", os.path.join(os.path.dirname(__file__), "..", "golden"))
LIMIT_S = float(os.environ.get("STOKER_TEST_LIMIT_S", "60"))
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U16": 2, "U8": 1}


def run(*args, code=0, limit=LIMIT_S, env=None):
    """Runs the command; its exit code must be `code`.  Returns (stdout, stderr)."""
    environment = dict(os.environ, **(env or {}))
    done = subprocess.run([STOKER] + [str(a) for a in args], stdout=subprocess.PIPE, env=environment,
                          stderr=subprocess.PIPE, timeout=limit)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, "exit %d, not %d: %s\n%s" % (done.returncode, code, err, " ".join(map(str, args)))
    return out, err


def refused(code, words, *args, absent=(), env=None):
    """The command says one sentence with every word in it, and leaves no file behind."""
    _, err = run(*args, code=code, env=env)
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("stoker: "), "not one sentence: %r" % err
    for word in [words] if isinstance(words, str) else words:
        assert word in err, "%r is not in %r" % (word, err)
    for path in absent:
        assert not os.path.exists(path), "%s was left" % path


def write_st(path, tensors, metadata=None, header=None):
    """tensors: {name: (dtype, shape, bytes)}."""
    head, at, data = {}, 0, b""
    if metadata:
        head["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data += raw
    text = header if header is not None else json.dumps(head).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


class Skip(Exception):
    pass


def skip(why):
    raise Skip(why)


def read_st(path):
    with open(path, "rb") as f:
        raw = f.read()
    n = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8:8 + n])
    head.pop("__metadata__", None)
    base = 8 + n
    return {k: (v["dtype"], v["shape"], raw[base + v["data_offsets"][0]:base + v["data_offsets"][1]])
            for k, v in head.items()}


def read(path):
    with open(path, "rb") as f:
        return f.read()


def sanitized():
    data = read(STOKER)
    return b"__asan_init" in data or b"__tsan_init" in data


def write(path, data):
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def tokens(path, n=2000, vocab=61):
    """A pattern that a small model can learn, as .bin of uint16."""
    write(path, struct.pack("<%dH" % n, *[(i * 7 + i // 13 % 3) % vocab for i in range(n)]))


def config(family="llama_gqa_old", **changes):
    with open(os.path.join(GOLDEN, family, "config.json")) as f:
        c = json.load(f)
    c.update(changes)
    return c


def make_model(folder, name="model", family="llama_gqa_old", seed=0, **changes):
    path = os.path.join(folder, name)
    write(path + ".json", json.dumps(config(family, **changes)))
    run("init", "--config", path + ".json", "--out", path, "--seed", seed)
    return path


def log(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


# The arithmetic is named: `auto` measures, and two runs on a busy machine may choose differently.
ARITHMETIC = ["--matmul", "f32"]
# Hundreds of runs of a few steps: what this machine can is measured by those that name fewer options.
UNMEASURED = ["--predict", "off"]
SMALL = ["--seq", "32", "--batch", "4", "--micro-batch", "2", "--lr", "1e-3", "--threads", "1", *ARITHMETIC, "--progress", "none",
         *UNMEASURED]


class Place:
    """A temporary folder with a model `model` and data `data.bin`."""

    def __init__(self):
        self.temp = tempfile.TemporaryDirectory(prefix="stoker-cli-")
        self.root = self.temp.name
        self.model = make_model(self.root)
        self.data = self.at("data.bin")
        tokens(self.data)

    def at(self, *name):
        return os.path.join(self.root, *name)

    def train(self, out, *more, model=None, data=None, small=SMALL, code=0):
        for fixed in (ARITHMETIC, UNMEASURED):
            if fixed[0] in more:
                small = [x for x in small if x not in fixed]
        return run("train", "--model", model or self.model, "--data", data or self.data, "--out", self.at(out),
                   *small, *more, code=code)


def run_tests(module):
    tests = [(k[5:], v) for k, v in sorted(vars(module).items()) if k.startswith("test_")]
    wanted, failed, n = sys.argv[1:], 0, 0
    place = Place()
    for name, function in tests:
        if wanted and not any(w in name for w in wanted):
            continue
        n += 1
        try:
            function(place)
            print("ok %d - %s" % (n, name), flush=True)
        except Skip as why:
            print("ok %d - %s # SKIP %s" % (n, name, why), flush=True)
        except (AssertionError, OSError, subprocess.TimeoutExpired, KeyError, ValueError):
            failed += 1
            for line in traceback.format_exc().splitlines()[-12:]:
                print("# " + line)
            print("not ok %d - %s" % (n, name), flush=True)
    print("1..%d" % n)
    sys.exit(1 if failed else 0)
