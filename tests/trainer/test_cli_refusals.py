#!/usr/bin/env python3
"""Bad use and bad input: one sentence, exit code 2 or 1, nothing left behind (issue: shown 7 and 8)."""

import json
import os
import shutil
import struct
import sys
import time

from cli_common import SMALL, config, make_model, read, read_st, refused, run, run_tests, tokens, write, write_st


def test_use_01_unknown_option_names_the_nearest(p):
    refused(2, ["--batsh", "--batch"], "train", "--batsh", "3")
    refused(2, "train", "tarin")
    refused(2, "--sede", "init", "--sede", "3")
    refused(2, "--sqe", "eval", "--sqe", "3")
    refused(2, "twice", "train", "--seq", "3", "--seq", "4")
    refused(2, "--lr", "train", "--lr", "fast")


def test_use_01_contradicting_options_are_refused_by_name(p):
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("never")]
    steps = base + ["--steps", "3"]
    cases = [
        (base, "--steps"), (steps + ["--epochs", "1"], "--epochs"), (steps + ["--params", "nvme"], "--nvme"),
        (steps + ["--optimizer-state", "nvme"], "--nvme"), (steps + ["--grads", "nvme"], "--nvme"),
        (steps + ["--device-memory", "1GiB"], "--device-memory"), (steps + ["--eval-every", "2"], "--eval-data"),
        (steps + ["--warmup", "4"], "--warmup"), (steps + ["--batch", "3"], "--micro-batch"),
        (steps + ["--any-numerics"], "--resume"), (steps + ["--loss-scale", "8"], "--loss-scale"),
        (steps + ["--storage", "posix"], "--storage"), (steps + ["--device", "sim"], "--simulate"),
        (steps + ["--dtype", "fp16", "--activation-dtype", "bf16"], "--activation-dtype"),
        (steps + ["--sim-faults", "3"], "--sim-faults"), (steps + ["--chunk", "2049"], "--chunk"),
        (steps + ["--nvme", p.root, "--params", "host", "--optimizer-state", "host", "--grads", "host"], "--nvme"),
    ]
    cases += [(steps + ["--activations", text], ["--activations", "keep:8,recompute"])
              for text in ["kept", "keep:", "keep:0,recompute", "keep:8recompute", "recompute:2,keep", "keep,recompute", "keep:2,", "auto:3", "",
                           "keep:-1", "keep:9999999999999"]]
    cases += [(steps + ["--activations", text], ["--activations " + text, "--nvme DIR"]) for text in ["nvme", "keep:2,nvme", "nvme:3"]]
    cases += [(steps + ["--optimizer-on-device", text], ["--optimizer-on-device", text, "auto", "0 to 1"]) for text in ["1.5", "-0.1", "all", "30%", "nan"]]
    cases += [(steps + ["--optimizer-on-device", "0.3"], ["--optimizer-on-device", "--device host"])]
    for args, word in cases:
        refused(2, word, *args, absent=[p.at("never")])


def test_device_cuda_says_what_is_missing(p):
    """Where there is a card there is nothing to refuse but a memory larger than it."""
    line = [x for x in run("doctor")[0].splitlines() if x.startswith("cuda ")][0]
    args = ["train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--steps", "1", *SMALL, "--device", "cuda"]
    if "not usable" in line:
        refused(1, line.split("not usable: ")[1], *args, absent=[p.at("never")])
        refused(1, "device cuda", *args, "--device-memory", "1GiB", absent=[p.at("never")])
    else:
        refused(1, "--device-memory", *args, "--device-memory", "900TiB", absent=[p.at("never")])
    refused(2, "--simulate", *args, "--simulate", "1", absent=[p.at("never")])


def small_train(p, model, data=None, *more):
    return ["train", "--model", model, "--data", data or p.data, "--out", p.at("never"), "--steps", "1", *SMALL, *more]


def test_ckp_22_truncated_weights(p):
    bad = p.at("cut")
    whole = read(os.path.join(p.model, "model.safetensors"))
    for at in [0, 4, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(p.model, bad)
        write(os.path.join(bad, "model.safetensors"), whole[:at])
        refused(1, "model.safetensors", *small_train(p, bad), absent=[p.at("never")])
    write(os.path.join(bad, "model.safetensors"), "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(1, "LFS", *small_train(p, bad), absent=[p.at("never")])
    write(os.path.join(bad, "model.safetensors"), whole + b"x")
    refused(1, "model.safetensors", *small_train(p, bad), absent=[p.at("never")])


def changed_model(p, change):
    bad = p.at("changed")
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(p.model, bad)
    path = os.path.join(bad, "model.safetensors")
    tensors = read_st(path)
    change(tensors)
    write_st(path, tensors)
    return bad


def test_ckp_23_lying_headers(p):
    whole = read(os.path.join(p.model, "model.safetensors"))
    n = struct.unpack("<Q", whole[:8])[0]
    for change in ["offset", "overlap", "negative", "dtype", "shape"]:
        head = json.loads(whole[8:8 + n])
        name = [k for k in head if k != "__metadata__"][1]
        entry = head[name]
        if change == "offset":
            entry["data_offsets"] = [1 << 40, (1 << 40) + 8]
        if change == "overlap":
            entry["data_offsets"] = [x - 2 for x in entry["data_offsets"]]
        if change == "negative":
            entry["data_offsets"] = [-2, 8]
        if change == "dtype":
            entry["dtype"] = "F99"
        if change == "shape":
            entry["shape"] = [1 << 33, 1 << 33]
        bad = p.at("lying")
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(p.model, bad)
        text = json.dumps(head).encode()
        write(os.path.join(bad, "model.safetensors"), struct.pack("<Q", len(text)) + text + whole[8 + n:])
        refused(1, name, *small_train(p, bad), absent=[p.at("never")])


def test_ckp_31_missing_extra_or_misshapen_tensor(p):
    name = "model.layers.1.mlp.up_proj.weight"
    refused(1, [name, "missing"], *small_train(p, changed_model(p, lambda t: t.pop(name))), absent=[p.at("never")])
    bad = changed_model(p, lambda t: t.update({"model.layers.7.x": t[name]}))
    refused(1, "model.layers.7.x", *small_train(p, bad), absent=[p.at("never")])
    bad = changed_model(p, lambda t: t.update({name: (t[name][0], t[name][1][::-1], t[name][2])}))
    refused(1, name, *small_train(p, bad), absent=[p.at("never")])


def test_ckp_34_ckp_35_configurations(p):
    bad = p.at("config")
    for change, word in [({"model_type": "gpt9"}, "gpt9"), ({"num_hidden_layers": 3}, "missing"), ({"hidden_size": 48}, "36"),
                         ({"wonder": 1}, "wonder"), ({"hidden_act": "gelu"}, "hidden_act"), ({"vocab_size": 99}, "99")]:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(p.model, bad)
        write(os.path.join(bad, "config.json"), json.dumps(config(**change)))
        refused(1, word, *small_train(p, bad), absent=[p.at("never")])
    write(os.path.join(bad, "config.json"), "{")
    refused(1, "config.json", *small_train(p, bad), absent=[p.at("never")])
    os.remove(os.path.join(bad, "config.json"))
    refused(1, "config.json", *small_train(p, bad), absent=[p.at("never")])
    refused(1, "nowhere", *small_train(p, p.at("nowhere")), absent=[p.at("never")])


def test_bad_data(p):
    bad = p.at("bad.bin")
    tokens(bad, vocab=62)
    refused(1, "61", *small_train(p, p.model, bad), absent=[p.at("never")])
    write(bad, b"")
    refused(1, "no tokens", *small_train(p, p.model, bad), absent=[p.at("never")])
    write(bad, b"abc")
    refused(1, "odd", *small_train(p, p.model, bad), absent=[p.at("never")])
    tokens(bad, n=20)
    refused(1, ["20", "32"], *small_train(p, p.model, bad), absent=[p.at("never")])
    refused(1, "epochs", "train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--epochs", "0.01", *SMALL,
            absent=[p.at("never")])
    refused(1, "128", "train", "--model", p.model, "--data", p.data, "--out", p.at("never"), "--steps", "1", "--seq", "129",
            absent=[p.at("never")])
    refused(1, "nothing*", *small_train(p, p.model, None, "--freeze", "nothing*"), absent=[p.at("never")])


def test_all_targets_masked_is_refused(p):
    data, n = p.at("masked.safetensors"), 400
    write_st(data, {"input_ids": ("U16", [n], struct.pack("<%dH" % n, *[i % 60 for i in range(n)])), "loss_mask": ("U8", [n], b"\0" * n)})
    refused(1, "no window holds a target", *small_train(p, p.model, data), absent=[p.at("never")])
    refused(1, "target", "eval", "--model", p.model, "--data", data, "--seq", "16")


def test_use_out_folder_with_foreign_files(p):
    out = p.at("foreign")
    os.makedirs(out)
    write(os.path.join(out, "thesis.txt"), "mine")
    refused(1, "thesis.txt", "train", "--model", p.model, "--data", p.data, "--out", out, "--steps", "1", *SMALL)
    assert os.listdir(out) == ["thesis.txt"]
    refused(1, "not empty", "init", "--config", os.path.join(p.model, "config.json"), "--out", out)
    write(p.at("file"), "x")
    refused(1, "not a folder", "train", "--model", p.model, "--data", p.data, "--out", p.at("file"), "--steps", "1", *SMALL)
    refused(1, "not a folder", "train", "--model", p.model, "--data", p.data, "--out", p.at("file", "x"), "--steps", "1", *SMALL)
    refused(1, "--log", *small_train(p, p.model, None, "--log", p.at("file", "log")), absent=[p.at("never")])
    refused(1, "checkpoint", *small_train(p, p.model, None, "--resume"), absent=[p.at("never")])


def test_mem_budgets_are_refused_within_two_seconds(p):
    nvme = p.at("swap")
    os.makedirs(nvme, exist_ok=True)
    cases = [(["--host-memory", "1MiB"], ["--host-memory", "MiB"]),
             (["--device", "host:discrete", "--device-memory", "64KiB"], ["device", "KiB"]),
             (["--nvme", p.at("gone"), "--params", "nvme"], ["gone"]),
             (["--nvme", nvme, "--params", "nvme", "--host-memory", "2MiB"], ["--host-memory"])]
    for more, words in cases:
        begin = time.monotonic()
        refused(1, words, *small_train(p, p.model, None, *more), absent=[p.at("never")])
        assert time.monotonic() - begin < float(os.environ.get("STOKER_TEST_REFUSAL_S", "2")), "slow refusal: %s" % more
    assert os.listdir(nvme) == []


def test_export_and_inspect_refusals(p):
    refused(2, "--checkpoint", "export", "--out", p.at("never"))
    refused(1, "manifest", "export", "--checkpoint", p.root, "--out", p.at("never"), absent=[p.at("never")])
    refused(1, "no-such", "inspect", p.at("no-such"))
    refused(2, "PATH", "inspect")
    refused(1, "neither", "inspect", p.root)


def test_help_and_version(p):
    for verb in ["init", "train", "plan", "eval", "export", "inspect", "doctor"]:
        out, err = run(verb, "--help")
        assert out.startswith("usage: stoker " + verb) and err == ""
    assert run("--version")[0].startswith("stoker 0.")
    assert "train" in run("--help")[0]


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
