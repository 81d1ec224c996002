#!/usr/bin/env python3
"""`stoker bench adam` and `stoker bench copy` as a user has them: small sizes, short times.  Prints TAP; standard library only."""

import json
import os
import subprocess
import sys
import tempfile
import traceback

STOKER = os.environ.get("STOKER_BINARY", "build/stoker")
LIMIT_S = float(os.environ.get("STOKER_TEST_LIMIT_S", "100"))
SMALL = ["--params", "300000", "--pairs", "2", "--time", "0.2"]
FIGURES = ["median_s", "p25_s", "p75_s", "low_s", "high_s", "bytes_per_s"]
SHARES = ["limit_bytes_per_s", "share_of_limit", "share_low", "share_high"]


def bench(*args, code=0):
    done = subprocess.run([STOKER, "bench"] + [str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, "exit %d, not %d: %s\n%s" % (done.returncode, code, err, out[-500:])
    return out, err


def results(folder, *args):
    path = os.path.join(folder, "r.json")
    out, _ = bench(*args, "--json", path)
    with open(path) as f:
        return out, json.load(f)


def near(a, b):
    return abs(a - b) <= 1e-6 * abs(b)


def check(r, shares=True):
    for key in FIGURES + (SHARES if shares else []):
        assert r[key] > 0, (key, r)
    assert r["low_s"] <= r["median_s"] <= r["high_s"] and r["p25_s"] <= r["p75_s"], r
    assert r["pairs"] >= 1 and r["threads"] >= 1, r


def test_adam_lists_every_layout_path_and_variant(folder):
    out, list_ = results(folder, "adam", *SMALL)
    seen = {(r["layout"], r["path"]) for r in list_}
    for layout in ("bf16_split", "fp16", "f32"):
        assert (layout, "arrays") in seen and (layout, "cache") in seen, seen
    for path in ("chunks", "small"):
        assert ("bf16_split", path) in seen and ("fp16", path) in seen, seen
    assert "bf16_split/scalar" in {r["variant"] for r in list_}
    assert {(r["moments"], r["path"]) for r in list_ if r["moments"] != "f32"} == {("bf16", "chunks"), ("8bit", "chunks")}
    for r in list_:
        check(r)
        assert r["params"] >= 300000 and r["params"] % 64 == 0
        assert r["bytes_per_param"] == ({"f32": 26, "bf16": 18, "8bit": 14.25}[r["moments"]] if r["layout"] == "bf16_split" else 28)
        assert near(r["bytes_per_s"], r["bytes_per_param"] * r["params"] / r["median_s"]), r
        layout = r["layout"] if r["moments"] == "f32" else r["layout"] + "+" + r["moments"]
        assert r["variant"].startswith(layout + "/") and r["limit"] and "ahead" in r["way"], r
        assert (r["tensors"] > 1) == (r["path"] == "small"), r
    assert "what this memory does" in out.splitlines()[-1], out


def test_adam_one_path_one_variant(folder):
    _, list_ = results(folder, "adam", *SMALL, "--layout", "f32", "--path", "arrays", "--kernel", "scalar", "--threads", "3")
    assert [(r["variant"], r["path"], r["threads"]) for r in list_] == [("f32/scalar", "arrays", 3)], list_


def test_adam_narrow_moments_alone(folder):
    _, list_ = results(folder, "adam", *SMALL, "--moments", "8bit")
    assert [(r["moments"], r["path"]) for r in list_] == [("8bit", "chunks")], list_
    check(list_[0])


def test_adam_without_a_limit(folder):
    _, list_ = results(folder, "adam", *SMALL, "--layout", "bf16_split", "--path", "arrays", "--no-limit")
    assert len(list_) == 1 and all(list_[0][k] is None for k in SHARES), list_
    check(list_[0], shares=False)


def test_adam_refuses_by_a_sentence(_):
    for args, word in ((["--kernel", "sse9"], "sse9"), (["--path", "diagonal"], "diagonal"), (["--params", "3"], "65536"), (["--layout", "x"], "bf16_split"),
                       (["--parms", "70000"], "params"), (["--layout", "f32", "--path", "chunks"], "16-bit"),
                       (["--moments", "8bit", "--path", "arrays"], "chunks"), (["--moments", "bf16", "--layout", "fp16"], "bf16_split")):
        _, err = bench("adam", *args, code=2)
        assert len(err.strip().splitlines()) == 1 and word in err, err


def test_copy_lists_each_on_one_thread_and_on_all(folder):
    out, list_ = results(folder, "copy", "--size", "8MiB", "--pairs", "2", "--time", "0.2", "--threads", "2")
    assert [(r["variant"], r["threads"]) for r in list_] == [(v, t) for v in ("copy", "grad_cast", "crc32c") for t in (1, 2)], list_
    for r in list_:
        check(r)
        assert near(r["bytes_per_s"], r["bytes"] / r["median_s"]), r
    assert "farthest from what memory allows" in out


def main():
    tests = [(n, f) for n, f in sorted(globals().items()) if n.startswith("test_")]
    failed = 0
    for i, (name, fn) in enumerate(tests, 1):
        try:
            with tempfile.TemporaryDirectory() as folder:
                fn(folder)
            print("ok %d - %s" % (i, name[5:]), flush=True)
        except Exception:
            failed += 1
            print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()), end="")
            print("not ok %d - %s" % (i, name[5:]), flush=True)
    print("1..%d" % len(tests))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
