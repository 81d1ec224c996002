#!/usr/bin/env python3
"""Tests of the demo's helpers in examples/demo; prints TAP, needs nothing but gzip."""

import array
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEMO = os.path.join(ROOT, "examples", "demo")


def run(script, *args):
    return subprocess.run([sys.executable, os.path.join(DEMO, script)] + list(args),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


def tensors(path, **named):
    header, data = {}, b""
    for name, (dtype, code, values) in named.items():
        raw = array.array(code, values).tobytes()
        header[name] = {"dtype": dtype, "shape": [len(values)],
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + data)
    return path


def compressed(text):
    """What Unix compress makes of a short text without using its dictionary: 9-bit codes."""
    assert len(text) < 200  # codes grow to 10 bits later
    bits = sum(byte << (9 * i) for i, byte in enumerate(text))
    return bits.to_bytes((9 * len(text) + 7) // 8, "little")


def bible_data(path, texts):
    blocks = [compressed(text) for text in texts]
    start = 80 + 12 + 4 * (len(blocks) + 1)
    offsets = [start + sum(map(len, blocks[:i])) for i in range(len(blocks) + 1)]
    with open(path, "wb") as out:
        out.write(b"EC02Compressed Data File".ljust(80, b"\0"))
        out.write(struct.pack(">3I", 1, 65536, len(blocks)))
        out.write(struct.pack(">%dI" % len(offsets), *offsets) + b"".join(blocks))
    return path


def test_unigram_by_hand():
    train = tensors("t", input_ids=("U16", "H", [2, 0, 0, 1, 0]), loss_mask=("U8", "B", [1] * 5))
    held = tensors("h", input_ids=("I32", "i", [0, 1, 2, 2]), loss_mask=("U8", "B", [1, 1, 1, 0]),
                   document_offsets=("I64", "q", [0, 2]))
    done = run("unigram.py", train, held)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    # Targets 0 0 1 0, one added to each of three: 4/7, 2/7, 1/7.  Held out: only the 1 at index 1.
    assert abs(result["unigram_cross_entropy"] - math.log(7 / 2)) < 1e-12, result
    assert result["heldout_targets"] == 1 and result["vocabulary"] == 3


def test_text_chapters():
    data = bible_data("d", [b"Title of it.\nGe1:1 In the beginning.\nGe1:2 And the ea",
                            b"rth.\nGe2:1 Thus.\n1Jo1:1 That which was.\n"])
    done = run("text.py", "--data", data, "--out", "o.jsonl")
    assert done.returncode == 0, done.stderr
    with open("o.jsonl") as source:
        texts = [json.loads(line)["text"] for line in source]
    assert sorted(texts) == ["In the beginning.\nAnd the earth.\n", "That which was.\n", "Thus.\n"]
    assert run("text.py", "--data", data, "--out", "o.txt").returncode == 0
    with open("o.txt") as source:
        assert source.read() == "\n".join(texts)
    run("text.py", "--data", data, "--out", "again.jsonl")
    with open("again.jsonl") as source:
        assert [json.loads(line)["text"] for line in source] == texts


def test_text_refuses_other_files():
    for content in (b"", b"something else", b"EC02Compressed Data File".ljust(80, b"\0") + b"\xff"):
        with open("d", "wb") as out:
            out.write(content)
        done = run("text.py", "--data", "d", "--out", "o")
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    done = run("text.py", "--data", "nothing", "--out", "o")
    assert done.returncode == 1 and "bible-kjv-text" in done.stderr
    assert not os.path.exists("o")


def test_same_logits():
    a = tensors("a", logits=("F32", "f", [1.0, 2.0]), other=("BF16", "H", [1]))
    near = tensors("b", logits=("F32", "f", [1.0, 2.0005]))
    assert run("same_logits.py", a, near).returncode == 0
    for values in ([1.0, 2.01], [1.0], [1.0, math.nan], [1.0, math.inf]):
        done = run("same_logits.py", a, tensors("b", logits=("F32", "f", values)))
        assert done.returncode == 1, (values, done)


def test_config_keeps_its_claims():
    """The demo's claims: about 20M parameters, more bytes than the device memory it asks for."""
    with open(os.path.join(DEMO, "config.json")) as source:
        c = json.load(source)
    h, heads = c["hidden_size"], c["head_dim"]
    layer = 2 * h * heads * (c["num_attention_heads"] + c["num_key_value_heads"])
    layer += 3 * h * c["intermediate_size"] + 2 * h
    total = c["num_hidden_layers"] * layer + h + 2 * c["vocab_size"] * h
    assert 18e6 < total < 25e6 and 2 * total > 32 << 20, total


def main():
    tests = [(n[5:], f) for n, f in sorted(globals().items()) if n.startswith("test_")]
    failed = 0
    print("1..%d" % len(tests))
    for number, (name, test) in enumerate(tests, 1):
        home = os.getcwd()
        with tempfile.TemporaryDirectory(prefix="stoker-test-") as folder:
            os.chdir(folder)
            try:
                test()
                print("ok %d - %s" % (number, name), flush=True)
            except Exception:
                failed += 1
                print("not ok %d - %s" % (number, name))
                print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()),
                      end="", flush=True)
            finally:
                os.chdir(home)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
