#!/usr/bin/env python3
"""Small real runs through the command: training, resuming, signals, checkpoints, export, evaluation."""

import glob
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time

from cli_common import (GOLDEN, SMALL, STOKER, log, make_model, read, read_st, refused, run, run_tests, tokens, write, write_st)

COSINE = ["--schedule", "cosine", "--warmup", "2"]


def weights(p, out):
    return read(p.at(out, "model.safetensors"))


def reference(p):
    """Six uninterrupted steps; made once."""
    if not os.path.exists(p.at("reference")):
        p.train("reference", "--steps", "6", *COSINE, "--log", p.at("reference.jsonl"))
    return weights(p, "reference")


def test_init_is_seeded_and_keeps_the_spelling(p):
    a, b, c = make_model(p.root, "i0", seed=1), make_model(p.root, "i1", seed=1), make_model(p.root, "i2", seed=2)
    same = [read(os.path.join(x, "model.safetensors")) for x in (a, b, c)]
    assert same[0] == same[1] != same[2]
    assert "torch_dtype" in read(os.path.join(a, "config.json")).decode()
    new = json.loads(read(os.path.join(make_model(p.root, "i3", "llama_head_dim_new"), "config.json")))
    assert new["dtype"] == "bfloat16" and "torch_dtype" not in new
    t = read_st(os.path.join(a, "model.safetensors"))
    assert t["model.norm.weight"][2] == b"\x80\x3f" * (len(t["model.norm.weight"][2]) // 2)
    emb = struct.unpack("<%dH" % (61 * 36), t["model.embed_tokens.weight"][2])
    values = [struct.unpack("<f", struct.pack("<I", v << 16))[0] for v in emb]
    deviation = math.sqrt(sum(v * v for v in values) / len(values))
    assert 0.018 < deviation < 0.022, deviation


def test_log_carries_what_the_interface_promises(p):
    reference(p)
    lines = log(p.at("reference.jsonl"))
    assert [x["step"] for x in lines] == [1, 2, 3, 4, 5, 6]
    for x in lines:
        for key in "step loss grad_norm lr tokens tokens_per_s step_s compute_s exposed_s skipped bytes".split():
            assert key in x, key
        assert set(x["exposed_s"]) >= {"nvme", "copy", "update", "gather", "other"}
        assert x["tokens"] == 4 * 32 and x["targets"] == 4 * 31
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_mem_23_the_start_is_timed(p):
    """Memory, files and pools: what making them ready took is a line and a key of the log's first line; a dry run makes none."""
    began = time.monotonic()
    out, _ = p.train("timed", "--steps", "2", "--log", p.at("timed.jsonl"))
    wall_s = time.monotonic() - began
    lines = [x for x in out.splitlines() if x.startswith("start ")]
    assert len(lines) == 1 and "of host memory, files and pools made ready in" in lines[0], out
    first, second = log(p.at("timed.jsonl"))
    assert 0 < first["start_s"] < wall_s and "start_s" not in second, (first, wall_s)
    assert lines[0].endswith(" in %.2f s" % first["start_s"]), (lines[0], first["start_s"])
    out, _ = p.train("timed-dry", "--steps", "2", "--dry-run")
    assert not [x for x in out.splitlines() if x.startswith("start ")], out


def test_mpx_11_learning_rate_follows_the_formula(p):
    reference(p)
    want = [0.5e-3, 1e-3] + [1e-3 * (1 + math.cos(math.pi * (u - 2) / 4)) / 2 for u in range(2, 6)]
    got = [x["lr"] for x in log(p.at("reference.jsonl"))]
    assert all(abs(a - b) < 1e-15 for a, b in zip(got, want)), (got, want)


def test_ckp_01_resume_gives_the_bits_of_an_uninterrupted_run(p):
    p.train("resumed", "--steps", "6", *COSINE, "--checkpoint-every", "2", "--save-final-state")
    assert weights(p, "resumed") == reference(p)
    assert sorted(os.listdir(p.at("resumed", "checkpoints"))) == ["step-00000004", "step-00000006"]
    shutil.rmtree(p.at("resumed", "checkpoints", "step-00000006"))
    for name in ["model.safetensors", "config.json"]:
        os.remove(p.at("resumed", name))
    os.makedirs(p.at("swap-r"), exist_ok=True)
    p.train("resumed", "--steps", "6", *COSINE, "--resume", "--log", p.at("resumed.jsonl"), "--nvme", p.at("swap-r"), "--params", "nvme",
            "--optimizer-state", "nvme", "--grads", "nvme")
    assert [x["step"] for x in log(p.at("resumed.jsonl"))] == [5, 6]
    assert weights(p, "resumed") == reference(p)
    assert os.listdir(p.at("swap-r")) == []


def test_placements_give_the_same_bits(p):
    os.makedirs(p.at("swap"), exist_ok=True)
    nvme = ["--nvme", p.at("swap")]
    for i, more in enumerate([nvme + ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"],
                              nvme + ["--optimizer-state", "nvme", "--update", "serial", "--storage", "posix"],
                              ["--device", "host:discrete", "--device-memory", "8MiB", "--activations", "recompute"],
                              ["--accumulate", "micro", "--prefetch", "0", "--update-threads", "1"],
                              nvme + ["--activations", "nvme", "--params", "host", "--optimizer-state", "host", "--grads", "host"],
                              nvme + ["--activations", "keep:1,nvme", "--device", "host:discrete"],
                              ["--activations", "keep:1,recompute", "--device", "host:discrete"],
                              ["--activations", "keep:1,host", "--device", "host:discrete", "--accumulate", "micro"]]):
        p.train("place%d" % i, "--steps", "6", *COSINE, *more)
        assert weights(p, "place%d" % i) == reference(p), more
    assert os.listdir(p.at("swap")) == []


def test_activations_on_nvme_are_counted_and_named(p):
    os.makedirs(p.at("swap-acts"), exist_ok=True)
    out, _ = p.train("acts", "--steps", "3", "--activations", "keep:1,nvme", "--nvme", p.at("swap-acts"), "--params", "host",
                     "--optimizer-state", "host", "--grads", "host", "--log", p.at("acts.jsonl"), "--trace", p.at("acts.json"))
    assert "1 last block kept, the others offloaded to nvme" in out and "a step writes to NVMe" in out, out
    steps = log(p.at("acts.jsonl"))
    moved = steps[0]["bytes"]["nvme_write"]
    assert moved > 0 and all(x["bytes"]["nvme_write"] == x["bytes"]["nvme_read"] == moved for x in steps), steps
    names = {x["name"] for x in json.loads(read(p.at("acts.json")))["traceEvents"]}
    assert any(x.startswith("act_out full 1.") for x in names) and any(x.startswith("act_in boundary") for x in names), names
    assert os.listdir(p.at("swap-acts")) == []


def test_simulated_run_replays_from_its_seed(p):
    sim = ["--steps", "6", *COSINE, "--storage", "sim", "--params", "nvme", "--optimizer-state", "nvme", "--matmul", "f32", "--simulate"]
    traces = []
    for i, seed in enumerate([5, 5, 6]):
        out, _ = p.train("sim%d" % i, *sim, seed)
        traces.append([line for line in out.splitlines() if line.startswith("trace")])
    assert traces[0] == traces[1] != traces[2] and traces[0]
    p.train("sim-not", "--steps", "6", *COSINE, "--matmul", "f32")
    for i in range(3):
        assert weights(p, "sim%d" % i) == weights(p, "sim-not")


def start(p, out, *more):
    return subprocess.Popen([STOKER, "train", "--model", p.model, "--data", p.data, "--out", p.at(out), *SMALL, *more],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_step(path, step, child):
    end = time.monotonic() + 60
    while not (os.path.exists(path) and read(path).count(b"\n") >= step):
        assert child.poll() is None and time.monotonic() < end, "no step %d" % step
        time.sleep(0.01)


def test_signal_finishes_the_step_and_writes_a_checkpoint(p):
    for number in [signal.SIGTERM, signal.SIGINT]:
        name = "stopped-%d" % number
        child = start(p, name, "--steps", "1000000", "--log", p.at(name + ".jsonl"))
        wait_for_step(p.at(name + ".jsonl"), 3, child)
        child.send_signal(number)
        child.communicate(timeout=60)
        assert child.returncode == 0
        last = log(p.at(name + ".jsonl"))[-1]["step"]
        assert os.listdir(p.at(name)) == ["checkpoints"]
        assert os.listdir(p.at(name, "checkpoints")) == ["step-%08d" % last]
    p.train(name, "--steps", last + 2, "--resume", "--log", p.at(name + ".jsonl"))
    assert [x["step"] for x in log(p.at(name + ".jsonl"))] == list(range(1, last + 3))
    p.train(name + "-whole", "--steps", last + 2)
    assert weights(p, name) == weights(p, name + "-whole")


def test_ckp_16_kill_leaves_checkpoints_and_no_model(p):
    child = start(p, "killed", "--steps", "1000000", "--log", p.at("killed.jsonl"), "--checkpoint-every", "2")
    wait_for_step(p.at("killed.jsonl"), 7, child)
    child.kill()
    child.communicate(timeout=60)
    assert not os.path.exists(p.at("killed", "model.safetensors")) and not os.path.exists(p.at("killed", "config.json"))
    out, _ = p.train("killed", "--steps", "1000000", "--resume", "--dry-run")
    assert "memory" in out
    steps = log(p.at("killed.jsonl"))[-1]["step"] + 3
    p.train("killed", "--steps", steps, "--resume")
    p.train("killed-whole", "--steps", steps)
    assert weights(p, "killed") == weights(p, "killed-whole")


def test_checkpoint_cut_at_every_twentieth(p):
    p.train("cut", "--steps", "2", "--save-final-state")
    folder = p.at("cut", "checkpoints", "step-00000002")
    files = sorted(os.listdir(folder))
    for name in files:
        whole = read(os.path.join(folder, name))
        for k in range(20):
            write(os.path.join(folder, name), whole[:len(whole) * k // 20])
            _, err = run("train", "--model", p.model, "--data", p.data, "--out", p.at("cut"), "--steps", "3", "--resume", *SMALL, code=1)
            assert "no complete checkpoint" in err and len(err.strip().splitlines()) == 1, err
            run("export", "--checkpoint", folder, "--out", p.at("never"), code=1)
            assert not os.path.exists(p.at("never"))
        write(os.path.join(folder, name), whole)
    p.train("cut", "--steps", "3", "--resume")


def test_ckp_broken_newest_is_passed_over(p):
    p.train("over", "--steps", "6", *COSINE, "--checkpoint-every", "2", "--save-final-state", "--keep-checkpoints", "3")
    state = p.at("over", "checkpoints", "step-00000006", "state-00001.safetensors")
    whole = bytearray(read(state))
    whole[len(whole) // 2] ^= 1
    write(state, bytes(whole))
    out, _ = p.train("over", "--steps", "6", *COSINE, "--resume")
    assert "step-00000006" in out and "step 5 is next" in out, out
    assert weights(p, "over") == reference(p)


def test_resume_refuses_another_run(p):
    p.train("other", "--steps", "2", "--save-final-state")
    base = ["train", "--data", p.data, "--out", p.at("other"), "--steps", "3", "--resume", "--progress", "none", "--threads", "1"]
    same = ["--model", p.model, "--lr", "1e-3", "--seq", "32"]
    refused(1, "--batch", *base, *same, "--batch", "8", "--micro-batch", "2")
    refused(1, "--seed", *base, *same, "--batch", "4", "--seed", "9")
    refused(1, "--seq", *base, "--model", p.model, "--seq", "16", "--batch", "4")
    refused(1, "numerics", *base, *same, "--batch", "4", "--activation-dtype", "f32")
    tokens(p.at("more.bin"), n=2100)
    refused(1, "--data", *base[:1], "--data", p.at("more.bin"), *base[3:], *same, "--batch", "4")
    model = make_model(p.root, "deeper", num_hidden_layers=3)
    refused(1, "another model", *base, "--model", model, "--seq", "32", "--batch", "4")
    refused(1, "--freeze", *base, *same, "--batch", "4", "--freeze", "model.embed*")
    refused(1, "--resume", *[x for x in base if x != "--resume"], *same, "--batch", "4")


def test_ckp_37_full_disk_at_a_save_is_an_alarm(p):
    """A file where the checkpoint folder should be made: the save fails, the run goes on and ends."""
    child = start(p, "alarm", "--steps", "400", "--checkpoint-every", "100", "--log", p.at("alarm.jsonl"))
    wait_for_step(p.at("alarm.jsonl"), 1, child)
    write(p.at("alarm", "checkpoints"), "in the way")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0 and b"ALARM" in err, err
    assert os.path.exists(p.at("alarm", "model.safetensors"))


def test_export_equals_the_end_of_training(p):
    write(os.path.join(p.model, "tokenizer.json"), "{}")
    write(os.path.join(p.model, "generation_config.json"), "{}")
    p.train("ended", "--steps", "6", *COSINE, "--save-final-state")
    run("export", "--checkpoint", p.at("ended"), "--out", p.at("exported"))
    for name in ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]:
        assert read(p.at("ended", name)) == read(p.at("exported", name)), name
    assert weights(p, "ended") == reference(p)
    losses = []
    for folder in ["ended", "exported"]:
        run("eval", "--model", p.at(folder), "--data", p.data, "--seq", "32", "--json", p.at("eval.json"))
        losses.append(json.loads(read(p.at("eval.json")))["loss"])
    assert losses[0] == losses[1]
    assert not glob.glob(p.at("*.partial"))


def test_ckp_32_tied_names_are_those_of_the_input(p):
    tied = make_model(p.root, "tied", "llama_rope3_tied_new")
    tokens(p.at("tied.bin"), vocab=90)
    path = os.path.join(tied, "model.safetensors")
    whole = read_st(path)
    assert "lm_head.weight" not in whole
    embed = whole["model.embed_tokens.weight"]
    both = dict(whole, **{"lm_head.weight": embed})
    head = dict(both)
    del head["model.embed_tokens.weight"]
    ends = []
    for i, tensors in enumerate([whole, both, head]):
        write_st(path, tensors)
        p.train("tied%d" % i, "--steps", "3", "--save-final-state", model=tied, data=p.at("tied.bin"))
        end = read_st(p.at("tied%d" % i, "model.safetensors"))
        assert set(end) == set(tensors)
        ends.append(end.get("model.embed_tokens.weight", end.get("lm_head.weight"))[2])
        run("export", "--checkpoint", p.at("tied%d" % i), "--out", p.at("tied-export%d" % i))
        assert read_st(p.at("tied-export%d" % i, "model.safetensors")) == end
    assert ends[0] == ends[1] == ends[2] != embed[2]


def test_ckp_05_frozen_tensors_stay_and_are_saved(p):
    p.train("frozen", "--steps", "4", "--freeze", "model.embed*", "--freeze", "*.mlp.*", "--checkpoint-every", "2")
    before, after = read_st(os.path.join(p.model, "model.safetensors")), read_st(p.at("frozen", "model.safetensors"))
    for name in before:
        is_frozen = name.startswith("model.embed") or ".mlp." in name
        assert (before[name] == after[name]) == is_frozen, name
    run("export", "--checkpoint", p.at("frozen"), "--out", p.at("frozen-export"))
    assert read_st(p.at("frozen-export", "model.safetensors"))["model.embed_tokens.weight"] == before["model.embed_tokens.weight"]


def test_ckp_10_lr_zero_keeps_the_weights_bit_for_bit(p):
    p.train("still", "--steps", "2", small=SMALL[:6] + ["--lr", "0", "--threads", "1", "--progress", "none"])
    assert read_st(p.at("still", "model.safetensors")) == read_st(os.path.join(p.model, "model.safetensors"))


def test_dumped_gradients_have_names_shapes_and_the_norm(p):
    p.train("grads", "--steps", "2", "--dump-gradients", p.at("grads-dump"), "--log", p.at("grads.jsonl"))
    lines = log(p.at("grads.jsonl"))
    model = read_st(os.path.join(p.model, "model.safetensors"))
    for line in lines:
        t = read_st(p.at("grads-dump", "step-%08d.safetensors" % line["step"]))
        assert {k: v[1] for k, v in t.items()} == {k: v[1] for k, v in model.items()}
        assert all(v[0] == "F32" for v in t.values())
        total = sum(x * x for v in t.values() for x in struct.unpack("<%df" % (len(v[2]) // 4), v[2]))
        assert abs(math.sqrt(total) - line["grad_norm"]) < 1e-5 * line["grad_norm"]


def test_epochs_and_eval_data(p):
    tokens(p.at("short.bin"), n=32 * 10)
    p.train("epochs", "--epochs", "2", "--eval-data", p.data, "--eval-every", "2", "--log", p.at("epochs.jsonl"), data=p.at("short.bin"))
    lines = log(p.at("epochs.jsonl"))
    assert len(lines) == 5
    assert ["eval_loss" in x for x in lines] == [False, True, False, True, True]
    run("eval", "--model", p.at("epochs"), "--data", p.data, "--seq", "32", "--json", p.at("epochs.json"), "--activation-dtype", "bf16",
        "--matmul", "auto", "--threads", "1")
    assert abs(json.loads(read(p.at("epochs.json")))["loss"] - lines[-1]["eval_loss"]) < 1e-2


def test_eval_against_golden_numbers(p):
    for folder in sorted(glob.glob(os.path.join(GOLDEN, "*", "golden.json"))):
        folder = os.path.dirname(folder)
        golden = json.loads(read(os.path.join(folder, "golden.json")))
        run("eval", "--model", folder, "--data", os.path.join(folder, "data.safetensors"), "--seq", golden["seq"], "--json",
            p.at("golden.json"), "--logits", p.at("golden.safetensors"))
        assert abs(json.loads(read(p.at("golden.json")))["loss"] - golden["loss"]) < 1e-4, folder
        want, got = read_st(os.path.join(folder, "golden.safetensors"))["logits"], read_st(p.at("golden.safetensors"))["logits"]
        assert want[1] == got[1]
        n = len(got[2]) // 4
        worst = max(abs(a - b) for a, b in zip(struct.unpack("<%df" % n, want[2]), struct.unpack("<%df" % n, got[2])))
        assert worst < 1e-3, (folder, worst)


def test_dry_run_and_plan_write_nothing(p):
    out, _ = p.train("dry", "--steps", "3", "--dry-run")
    assert "memory" in out and "total" in out and not os.path.exists(p.at("dry"))
    out, _ = run("plan", "--model", p.model, "--data", p.data, "--steps", "3", *SMALL[:10], "--trace", p.at("trace.json"), "--plan",
                 p.at("plan.txt"))
    assert "memory" in out and json.loads(read(p.at("trace.json"))) and read(p.at("plan.txt"))


def test_inexact_moments_are_labelled_and_the_same_on_any_placement(p):
    nvme = ["--nvme", p.at("swap-m"), "--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]
    os.makedirs(p.at("swap-m"), exist_ok=True)
    p.train("exact", "--steps", "4")
    seen = {read(os.path.join(p.at("exact"), "model.safetensors"))}
    for kind, other in (("bf16", "8bit"), ("8bit", "bf16")):
        out, _ = p.train("host-" + kind, "--steps", "4", "--moments", kind, "--checkpoint-every", "2")
        assert "moments %s, inexact" % kind in out and "moments=%s" % kind in out and "moments %s (host)" % kind in out
        p.train("nvme-" + kind, "--steps", "4", "--moments", kind, "--update", "speculate", *nvme)
        bits = read(os.path.join(p.at("host-" + kind), "model.safetensors"))
        assert bits == read(os.path.join(p.at("nvme-" + kind), "model.safetensors")) and bits not in seen
        seen.add(bits)
        out, _ = run("inspect", p.at("host-" + kind, "checkpoints", "step-00000002"))
        assert '"%s"' % kind in out
        again = ["train", "--model", p.model, "--data", p.data, "--out", p.at("host-" + kind), *SMALL, "--steps", "4", "--resume"]
        for name in ("config.json", "model.safetensors"):
            os.remove(p.at("host-" + kind, name))
        refused(1, ["--moments " + kind, "--any-numerics"], *again, "--moments", other)
        run(*again, "--moments", kind)
        assert bits == read(os.path.join(p.at("host-" + kind), "model.safetensors"))
        os.remove(p.at("host-" + kind, "model.safetensors"))
        run(*again, "--moments", other, "--any-numerics")
        refused(1, ["--update speculate", "--moments"], "train", "--model", p.model, "--data", p.data, "--out", p.at("never"), *SMALL,
                "--steps", "1", "--moments", kind, "--update", "speculate", "--optimizer-state", "host", absent=[p.at("never", "config.json")])


def test_use_08_use_10_start_table(p):
    os.makedirs(p.at("swap10"), exist_ok=True)
    out, _ = p.train("table", "--steps", "1", "--nvme", p.at("swap10"), "--optimizer-state", "nvme")
    assert "master fp32 (nvme)" in out and "moments fp32 (nvme)" in out and "to NVMe per step" in out and "numerics" in out
    total, rows = None, 0
    for line in out.splitlines():
        if line.startswith("  nvme"):
            rows += 1
            total = line
    assert rows >= 2 and "total" in total


def test_mem_11_evaluation_has_no_gradients_and_no_state(p):
    out, _ = run("eval", "--model", p.model, "--data", p.data, "--seq", "32", "--dry-run")
    assert "parameters (16-bit)" in out and "gradient" not in out.split("memory\n")[1] and "optimizer" not in out.split("memory\n")[1]


def test_fp16_scales_the_loss_and_exports_fp16(p):
    half = ["--steps", "4", "--dtype", "fp16", "--loss-scale", "1024", "--optimizer", "adam"]
    p.train("half", *half, "--checkpoint-every", "2", "--log", p.at("half.jsonl"))
    lines = log(p.at("half.jsonl"))
    assert all(x["loss_scale"] == 1024 and not x["skipped"] and x["grad_norm"] < 10 for x in lines), lines
    t = read_st(p.at("half", "model.safetensors"))
    assert all(v[0] == "F16" for v in t.values()) and b"float16" in read(p.at("half", "config.json"))
    whole = weights(p, "half")
    os.remove(p.at("half", "config.json"))
    p.train("half", *half, "--resume")
    assert weights(p, "half") == whole
    p.train("bf16", "--steps", "1", "--optimizer", "adam", "--activation-dtype", "f32", "--matmul", "f32", "--log", p.at("bf16.jsonl"))
    p.train("fp16", "--steps", "1", "--optimizer", "adam", "--dtype", "fp16", "--matmul", "f32", "--log", p.at("fp16.jsonl"))
    a, b = log(p.at("bf16.jsonl"))[0], log(p.at("fp16.jsonl"))[0]
    assert abs(a["loss"] - b["loss"]) < 1e-3 and abs(a["grad_norm"] - b["grad_norm"]) < 1e-2 * a["grad_norm"]


def test_ckp_28_ckp_29_shards_follow_the_index(p):
    golden = os.path.join(GOLDEN, "qwen3_untied_sharded_new")
    names = sorted(x for x in os.listdir(golden) if x.startswith("model-"))
    assert len(names) > 1
    for name in names + ["stray", "index"]:
        folder = p.at("shards-" + name)
        shutil.copytree(golden, folder)
        args = ["eval", "--model", folder, "--data", os.path.join(golden, "data.safetensors"), "--seq", "18", "--dry-run"]
        if name == "stray":
            write(os.path.join(folder, "model-extra.safetensors"), "not part of the model")
            run(*args)
        elif name == "index":
            index = json.loads(read(os.path.join(folder, "model.safetensors.index.json")))
            index["weight_map"].pop(sorted(index["weight_map"])[0])
            write(os.path.join(folder, "model.safetensors.index.json"), json.dumps(index))
            refused(1, "index", *args)
        else:
            os.remove(os.path.join(folder, name))
            refused(1, name, *args)


def test_use_01_print_config(p):
    out, _ = p.train("printed", "--steps", "3", "--print-config")
    lines = {x.split()[0]: x.split()[1] for x in out.splitlines()}
    assert lines["steps"] == "3" and lines["clip"] == "1" and lines["eval-data"] == "-"
    assert not os.path.exists(p.at("printed"))


def test_config_file_gives_options(p):
    write(p.at("options.json"), json.dumps({"steps": 2, "lr": 5e-4, "seq": 16}))
    p.train("from-file", "--config", p.at("options.json"), "--log", p.at("from-file.jsonl"),
            small=["--batch", "2", "--progress", "none", "--seq", "24"])
    lines = log(p.at("from-file.jsonl"))
    assert len(lines) == 2 and lines[0]["lr"] == 5e-4 and lines[0]["tokens"] == 48
    write(p.at("options.json"), json.dumps({"stesp": 2}))
    refused(2, ["stesp", "steps"], "train", "--config", p.at("options.json"))


def test_mpx_01_non_finite_gradients_are_skipped_and_stop_the_run(p):
    broken = p.at("broken")
    shutil.copytree(p.model, broken)
    path = os.path.join(broken, "model.safetensors")
    t = read_st(path)
    raw = bytearray(t["model.norm.weight"][2])
    raw[0:2] = b"\xc0\x7f"  # NaN
    t["model.norm.weight"] = (t["model.norm.weight"][0], t["model.norm.weight"][1], bytes(raw))
    write_st(path, t)
    run_ = subprocess.run([STOKER, "train", "--model", broken, "--data", p.data, "--out", p.at("nan"), *SMALL, "--steps", "200", "--log",
                           p.at("nan.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert run_.returncode == 1, run_.stderr
    lines = log(p.at("nan.jsonl"))
    assert len(lines) >= 49 and all(x["skipped"] and x["grad_norm"] is None and x["loss"] is None for x in lines)
    assert len({x["lr"] for x in lines}) == 1
    assert run_.stdout.count(b"was skipped") == 10
    assert not os.path.exists(p.at("nan", "config.json"))


def test_inspect_and_doctor(p):
    reference(p)
    assert "llama" in run("inspect", p.model)[0]
    assert "2000 in" in run("inspect", p.data)[0]
    assert "model.norm.weight" in run("inspect", p.at("reference", "model.safetensors"))[0]
    p.train("seen", "--steps", "1", "--save-final-state")
    assert "checksums agree" in run("inspect", p.at("seen", "checkpoints"))[0]
    out, _ = run("doctor", "--nvme", p.root)
    for word in ["processor", "memory", "products", "cuda", "io_uring", "nvme"]:
        assert word in out, word


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
