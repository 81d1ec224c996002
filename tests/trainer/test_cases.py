"""Rows of the project's cases that concern the command and have no test elsewhere, each by its id."""

import json
import os
import struct
import subprocess
import sys

from cli_common import STOKER, log, make_model, read, refused, run_tests, skip, write

STATES = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]


def swap(p, name):
    os.makedirs(p.at(name), exist_ok=True)
    return ["--nvme", p.at(name)]


def test_ckp_08_export_never_mixes_with_other_files(p):
    p.train("ckp08", "--steps", "1", "--save-final-state")
    os.makedirs(p.at("ckp08-full"))
    write(p.at("ckp08-full", "model-00009-of-00009.safetensors"), "someone's")
    refused(1, "not empty", "export", "--checkpoint", p.at("ckp08", "checkpoints"), "--out",
            p.at("ckp08-full"))
    assert os.listdir(p.at("ckp08-full")) == ["model-00009-of-00009.safetensors"]
    assert read(p.at("ckp08-full", "model-00009-of-00009.safetensors")) == b"someone's"


def test_ckp_13_learning_rate_goes_on_after_resume(p):
    more = ["--schedule", "cosine", "--warmup", "3"]
    p.train("ckp13", "--steps", "8", *more, "--log", p.at("whole.jsonl"))
    p.train("ckp13-b", "--steps", "8", *more, "--checkpoint-every", "5")
    for name in ["model.safetensors", "config.json"]:
        os.remove(p.at("ckp13-b", name))
    p.train("ckp13-b", "--steps", "8", *more, "--resume", "--log", p.at("resumed.jsonl"))
    rates = {x["step"]: x["lr"] for x in log(p.at("whole.jsonl"))}
    resumed = log(p.at("resumed.jsonl"))
    assert [x["step"] for x in resumed] == [6, 7, 8]
    assert all(x["lr"] == rates[x["step"]] for x in resumed), (rates, resumed)


def peak_bytes(*args):
    """Peak resident memory of one run of the command, measured from a process of its own."""
    code = ("import resource, subprocess, sys; c = subprocess.run(sys.argv[1:], stdout=2).returncode; "
            "print(c, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)")
    done = subprocess.run([sys.executable, "-c", code, STOKER, *args], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, timeout=120)
    code, peak = done.stdout.split()
    assert int(code) == 0, args
    return int(peak)


def test_ckp_20_export_streams(p):
    if "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ:
        skip("a sanitizer has its own use of memory")
    model = make_model(p.root, "ckp20-model", hidden_size=512, intermediate_size=1536,
                       num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8)
    p.train("ckp20", "--steps", "1", "--save-final-state", model=model,
            small=["--seq", "8", "--batch", "1", "--micro-batch", "1", "--progress", "none"])
    folder = p.at("ckp20", "checkpoints", "step-00000001")
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    peak = peak_bytes("export", "--checkpoint", folder, "--out", p.at("ckp20-out"))
    small = peak_bytes("--version")
    assert size > 400e6 and peak - small < size / 8, (size, peak, small)
    assert read(p.at("ckp20-out", "model.safetensors")) == read(p.at("ckp20", "model.safetensors"))


def test_use_02_the_default_run_needs_only_model_data_and_steps(p):
    out, _ = p.train("use02", "--steps", "1", small=["--seq", "32"])
    for word in ["placement:", "memory", "numerics", "update:"]:
        assert word in out, word


def test_use_04_compute_and_waits_sum_to_the_step(p):
    p.train("use04", "--steps", "6", *swap(p, "swap04"), *STATES, "--log", p.at("use04.jsonl"))
    for x in log(p.at("use04.jsonl")):
        total = x["compute_s"] + sum(x["exposed_s"].values())
        assert abs(total - x["step_s"]) <= 0.03 * x["step_s"] + 1e-3, x
        assert x["bytes"]["nvme_read"] > 0, x


def sparse_llama(folder, vocab=32000, hidden=4096, inner=11008, layers=32, heads=32):
    """A model folder of full size whose weights are one hole: planning reads names and shapes only."""
    os.makedirs(folder)
    write(os.path.join(folder, "config.json"), json.dumps({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False}))
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden],
              "lm_head.weight": [vocab, hidden]}
    for i in range(layers):
        at = "model.layers.%d." % i
        shapes.update({at + "self_attn.%s_proj.weight" % n: [hidden, hidden] for n in "qkvo"})
        shapes.update({at + "mlp.%s_proj.weight" % n: [inner, hidden] for n in ["gate", "up"]})
        shapes[at + "mlp.down_proj.weight"] = [hidden, inner]
        shapes.update({at + n: [hidden] for n in ["input_layernorm.weight", "post_attention_layernorm.weight"]})
    head, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)


def test_use_11_a_7b_model_on_a_24_gib_card(p):
    """One command for a full fine-tune of 7B: it runs, or one sentence says what is missing."""
    sparse_llama(p.at("m7b"))
    args = ["train", "--model", p.at("m7b"), "--data", p.data, "--out", p.at("use11"), "--steps", "10", "--seq", "512",
            "--batch", "8", "--micro-batch", "1", "--device", "host:discrete", "--dry-run", *swap(p, "swap11")]
    done = subprocess.run([STOKER, *args, "--device-memory", "24GiB", "--host-memory", "64GiB"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=60)
    out, err = done.stdout.decode(), done.stderr.decode()
    if done.returncode == 0:
        assert "optimizer state" in out and "device" in out and not err, (out, err)
    else:  # this machine's disk is too small for it
        assert done.returncode == 1 and len(err.splitlines()) == 1, err
        assert "GiB are needed" in err and "are free" in err and "--optimizer-state host" in err, err
    # a card that cannot do it: which bytes, and what would help
    refused(1, ["--device-memory", "are needed", "the largest owner is"], *args, "--device-memory", "1GiB",
            "--host-memory", "64GiB", absent=[p.at("use11")])
    assert not os.listdir(p.at("swap11"))


def test_use_05_the_storage_path_in_use_is_named(p):
    for kind, words in [("posix", "posix threads"), ("auto", "crc32c")]:
        out, _ = p.train("use05-" + kind, "--steps", "1", *swap(p, "swap05"), *STATES, "--storage", kind)
        line = [x for x in out.splitlines() if "storage:" in x]
        assert len(line) == 1 and words in line[0], (kind, line)


run_tests(sys.modules[__name__])
