"""Rows of the project's cases that concern the command and have no test elsewhere, each by its id."""

import os
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


def test_use_05_the_storage_path_in_use_is_named(p):
    for kind, words in [("posix", "posix threads"), ("auto", "crc32c")]:
        out, _ = p.train("use05-" + kind, "--steps", "1", *swap(p, "swap05"), *STATES, "--storage", kind)
        line = [x for x in out.splitlines() if "storage:" in x]
        assert len(line) == 1 and words in line[0], (kind, line)


run_tests(sys.modules[__name__])
