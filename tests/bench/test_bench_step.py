#!/usr/bin/env python3
"""`stoker bench step` as a user has it, on a tiny model.  Prints TAP; standard library only."""

import json
import os
import subprocess
import sys
import tempfile
import traceback

STOKER = os.environ.get("STOKER_BINARY", "build/stoker")
LIMIT_S = float(os.environ.get("STOKER_TEST_LIMIT_S", "120"))
KEYS = ["what", "seconds", "flops", "bytes", "rate", "limit", "share"]
SHAPE = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def bench(*args, code=0):
    done = subprocess.run([STOKER, "bench", "step"] + [str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, "exit %d, not %d: %s\n%s" % (done.returncode, code, err, out[-500:])
    return out, err


def model(place, **changes):
    with open(os.path.join(place, "config.json"), "w") as f:
        json.dump(dict(SHAPE, **changes), f)
    return ["--model", place, "--seq", 16, "--batch", 2, "--steps", 2]


def matrix_params(shape):
    d = shape["hidden_size"] // shape["num_attention_heads"]
    per_layer = shape["hidden_size"] * (2 * shape["hidden_size"] + 2 * d * shape["num_key_value_heads"] + 3 * shape["intermediate_size"])
    return shape["num_hidden_layers"] * per_layer + shape["vocab_size"] * shape["hidden_size"]


def test_table(place):
    """Every part with its keys; products are all of the step's; the parts make up the step."""
    for tied in (False, True):
        for matmul in ("f32", "auto"):
            f = os.path.join(place, "step.json")
            out, _ = bench(*model(place, tie_word_embeddings=tied), "--matmul", matmul, "--json", f)
            with open(f) as text:
                rows = json.load(text)
            for r in rows:
                assert all(k in r for k in KEYS), r
                assert r["seconds"] >= 0 and (r["share"] is None or r["share"] > 0), r
            named = {r["what"]: r for r in rows}
            assert named["product"]["flops"] == 6 * 32 * matrix_params(SHAPE), named["product"]
            for what in ("attention_forward", "attention_backward", "rmsnorm_forward", "swiglu_backward", "head_train", "embed_forward",
                         "rope", "grad_cast", "step"):
                assert named[what]["calls"] > 0, what
            assert named["step"]["flops"] > named["product"]["flops"] and named["step"]["limit"] > 0
            assert "matrix rate" in out and "matmul=" in out


def test_ways(place):
    bench(*model(place), "--activations", "recompute", "--update", "chase", "--threads", 1)


def test_refusals(place):
    _, err = bench("--model", os.path.join(place, "none"), code=1)
    assert "config.json" in err and len(err.strip().splitlines()) == 1, err
    _, err = bench("--step", 3, code=2)
    assert "--steps" in err, err
    out, _ = bench("--help")
    assert "--json" in out and "--activations" in out
    _, err = bench(*model(place)[:2], "--seq", 1000, code=1)
    assert "max_position_embeddings" in err, err


def main():
    tests = [(k[5:], v) for k, v in sorted(globals().items()) if k.startswith("test_")]
    failed = 0
    for n, (name, function) in enumerate(tests, 1):
        try:
            with tempfile.TemporaryDirectory(prefix="stoker-step-", dir=os.environ.get("STOKER_TEST_DIR")) as place:
                function(place)
            print("ok %d - %s" % (n, name), flush=True)
        except (AssertionError, OSError, subprocess.TimeoutExpired, KeyError, ValueError):
            failed += 1
            for line in traceback.format_exc().splitlines()[-12:]:
                print("# " + line)
            print("not ok %d - %s" % (n, name), flush=True)
    print("1..%d" % len(tests))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
