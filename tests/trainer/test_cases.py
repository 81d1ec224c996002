"""Rows of the project's cases that concern the command and have no test elsewhere, each by its id."""

import json
import os
import re
import struct
import subprocess
import sys

from cli_common import LIMIT_S, SMALL, STOKER, log, make_model, read, refused, run, run_tests, skip, write

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
            small=["--seq", "8", "--batch", "1", "--micro-batch", "1", "--progress", "none", "--predict", "off"])
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
            "--batch", "8", "--micro-batch", "1", "--device", "host:discrete", "--predict", "off", "--dry-run", *swap(p, "swap11")]
    done = subprocess.run([STOKER, *args, "--device-memory", "24GiB", "--host-memory", "64GiB"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=LIMIT_S)
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


def test_adm_07_loss_curves_of_300_steps_agree(p):
    """Offload off, in host memory, on NVMe: one curve to the bit. One micro-batch and four: but for the order of sums, whose
    differences decide how a few gradients round to bf16: norms within 1e-3, half a unit of bf16."""
    tiers = {"off": ["--params", "device", "--device", "host:discrete"], "host": ["--params", "host"],
             "nvme": [*swap(p, "swap07"), *STATES]}
    exact = ["--steps", "300", "--activation-dtype", "f32", "--matmul", "f32", "--predict", "off"]
    curves = {}
    for micro in ["4", "1"]:
        for tier, more in tiers.items():
            name = "adm07-%s-%s" % (tier, micro)
            p.train(name, *exact, *more, "--log", p.at(name + ".jsonl"),
                    small=["--seq", "24", "--batch", "4", "--micro-batch", micro, "--lr", "3e-4", "--threads", "1",
                           "--update-threads", "1", "--progress", "none"])
            curves[tier, micro] = [(x["loss"], x["grad_norm"]) for x in log(p.at(name + ".jsonl"))]
            assert curves[tier, micro] == curves["off", micro], "%s is another curve than offload off" % name
    one, four = curves["off", "4"], curves["off", "1"]
    assert len(one) == 300 and one[-1][0] < 0.75 * one[0][0], (one[0], one[-1])
    loss = max(abs(a[0] - b[0]) for a, b in zip(one, four))
    norm = max(abs(a[1] / b[1] - 1) for a, b in zip(one, four))
    print("# loss %.3f to %.3f; four micro-batches against one: loss within %.2g, norm within %.2g of itself"
          % (one[0][0], one[-1][0], loss, norm))
    assert loss <= 1e-3 and norm <= 1e-3, (loss, norm)


def test_adm_16_an_optimizer_that_is_not_there_is_refused_by_name(p):
    """Never run as another one, and never on a flattened view."""
    for name in ["muon", "adagrad", "lion", "sgd", "adam8bit"]:
        refused(2, ["--optimizer", name, "adamw"], "train", "--model", p.model, "--data", p.data, "--out", p.at("never"),
                "--steps", "1", "--optimizer", name, absent=[p.at("never")])


def test_mpx_04_effective_values_are_those_of_the_manual(p):
    """No options: what is in force is what `--help` says, and fp16 begins at the documented 65536."""
    text, _ = run("train", "--help")
    manual = dict(re.findall(r"^  --([a-z0-9-]+) .*default ([^ ;,)]+)\)", text, re.M))
    out, _ = p.train("printed04", "--steps", "3", "--print-config", small=[])
    lines = {x.split()[0]: x.split()[1] for x in out.splitlines()}
    checked = {k for k in manual if k in lines}
    assert {"clip", "lr", "beta1", "beta2", "eps", "weight-decay", "dtype", "optimizer", "seq", "batch"} <= checked, checked
    for name in checked:
        assert lines[name] == manual[name] or float(lines[name]) == float(manual[name]), (name, lines[name], manual[name])
    assert re.search(r"--loss-scale .*default 65536", text)
    out, _ = p.train("mpx04", "--steps", "1", "--dtype", "fp16", "--log", p.at("mpx04.jsonl"))
    assert "loss scale 65536 at first" in out and log(p.at("mpx04.jsonl"))[0]["loss_scale"] == 65536


def test_mem_13_what_is_measured_at_the_start_stays_within_the_plan(p):
    """State on NVMe: the peak of the process is that of the table, though this machine is measured before it is reserved."""
    if "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ:
        skip("a sanitizer takes memory of its own")
    run("init", "--config", os.path.join(ROOT, "examples", "demo", "config.json"), "--out", p.at("mem13"))
    nvme = p.at("mem13-nvme")
    os.mkdir(nvme)
    out, _ = p.train("mem13-out", "--steps", "2", "--nvme", nvme, "--params", "nvme", "--optimizer-state", "nvme", "--predict", "auto",
                     "--log", p.at("mem13.jsonl"), model=p.at("mem13"))
    planned = re.search(r"^  peak memory +([0-9.]+) (MiB|GiB) +([0-9.]+) (MiB|GiB)", out, re.M)
    assert planned and planned.group(2) == planned.group(4), out
    assert float(planned.group(3)) <= 1.05 * float(planned.group(1)), planned.group(0)


def test_mem_26_threads_follow_the_cores_the_process_has(p):
    """No --threads: as many as the cpuset gives, not as the machine has."""
    cores = sorted(os.sched_getaffinity(0))
    small = [x for x in SMALL if x not in ("--threads", "1")] + ["--dry-run"]
    for n in {1, min(2, len(cores))}:
        args = ["train", "--model", p.model, "--data", p.data, "--out", p.at("mem26"), "--steps", "1", *small]
        done = subprocess.run([STOKER, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
                              preexec_fn=lambda n=n: os.sched_setaffinity(0, cores[:n]))
        assert done.returncode == 0 and b";threads=%d;" % n in done.stdout, (n, done.stdout, done.stderr)


run_tests(sys.modules[__name__])
