#!/usr/bin/env python3
"""Attacks on the command that once worked: outputs over inputs, folders of others, resumed runs that changed, two runs on one folder,
closed streams.  Cases USE-01, CKP-11, CKP-16, CKP-34."""

import json
import os
import shutil
import subprocess
import sys

from cli_common import SMALL, STOKER, log, make_model, read, read_st, refused, run, run_tests, write, write_st, skip
from test_cli_runs import start, wait_for_step

NVME = ["--params", "nvme", "--optimizer-state", "nvme"]


def base(p, out="never", model=None, data=None):
    return ["train", "--model", model or p.model, "--data", data or p.data, "--out", p.at(out), "--steps", "2", *SMALL]


def test_outputs_never_overwrite_inputs(p):
    data, config = read(p.data), os.path.join(p.model, "config.json")
    before = read(config)
    for option in ["--log", "--plan"]:
        refused(1, [option, "input"], *base(p), option, p.data, absent=[p.at("never")])
        refused(1, [option, "--model"], *base(p), option, config, absent=[p.at("never")])
        refused(1, [option, "folder"], *base(p), option, p.model, absent=[p.at("never")])
    for option in ["--json", "--logits"]:
        refused(1, [option, "input"], "eval", "--model", p.model, "--data", p.data, "--seq", "32", option, p.data)
        refused(1, [option, "regular"], "eval", "--model", p.model, "--data", p.data, "--seq", "32", option, "/dev/null")
    write(p.at("both"), "")
    refused(1, "two options", *base(p), "--log", p.at("both"), "--plan", p.at("both"), absent=[p.at("never")])
    assert read(p.data) == data and read(config) == before


def test_folders_of_others_stay(p):
    for name in ["made.partial", "exported.partial"]:
        os.makedirs(p.at(name))
        write(p.at(name, "thesis.txt"), "mine")
    os.makedirs(p.at("empty"))
    run("init", "--config", p.model + ".json", "--out", p.at("made"))
    refused(1, "nowhere", *base(p, "empty", model=p.at("nowhere")))
    assert os.path.isdir(p.at("empty")), "an empty folder that was there before was removed"
    run(*base(p, "run"), "--save-final-state")
    run("export", "--checkpoint", p.at("run"), "--out", p.at("exported"))
    for name in ["made.partial", "exported.partial"]:
        assert read(p.at(name, "thesis.txt")) == b"mine"


def test_empty_and_missing_paths(p):
    config = p.model + ".json"
    before = sorted(os.listdir("."))
    refused(1, ["--out", "empty"], "init", "--config", config, "--out", "")
    refused(1, ["--out", "empty"], "export", "--checkpoint", p.root, "--out", "")
    refused(2, "twice", "init", "--config", config, "--config", config, "--out", p.at("never"), absent=[p.at("never")])
    refused(2, "needs a value", "init", "--out", p.at("never"), "--config")
    for option in ["--json", "--logits"]:
        refused(1, [option, "is not there"], "eval", "--model", p.model, "--data", p.data, "--seq", "32", option, p.at("none", "x"))
    assert sorted(os.listdir(".")) == before


def test_pipes_do_not_block(p):
    os.mkfifo(p.at("pipe.bin"))
    os.mkfifo(p.at("pipe"))
    refused(1, "regular", *base(p, data=p.at("pipe.bin")), absent=[p.at("never")])
    refused(1, "regular", *base(p, data=p.at("pipe")), absent=[p.at("never")])
    refused(1, "regular", "init", "--config", p.at("pipe"), "--out", p.at("never"), absent=[p.at("never")])
    refused(2, "config file", *base(p), "--config", p.at("pipe"), absent=[p.at("never")])


def test_nvme_folder_twice_or_no_folder(p):
    folder = p.at("swap")
    os.makedirs(folder)
    os.symlink(folder, p.at("link"))
    write(p.at("plain"), "x")
    for other in [folder, folder + "/.", p.at("link")]:
        refused(1, "same folder", *base(p), "--nvme", folder + "," + other, *NVME, absent=[p.at("never")])
    refused(1, "not a folder", *base(p), "--nvme", p.at("plain"), *NVME, absent=[p.at("never")])


def test_ckp_34_resume_of_a_changed_run(p):
    args = ["--checkpoint-every", "2", "--steps", "4"]
    start_args = ["train", "--model", p.model, "--data", p.data, "--out", p.at("first"), *SMALL]
    run(*start_args, *args)
    for change, word in [({"rope_theta": 77.0}, "rope_theta"), ({"rms_norm_eps": 1e-2}, "rms_norm_eps"),
                         ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling")]:
        other = p.at("other")
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(p.model, other)
        with open(os.path.join(other, "config.json")) as f:
            config = json.load(f)
        config.update(change)
        write(os.path.join(other, "config.json"), json.dumps(config))
        refused(1, ["--resume", word], "train", "--model", other, *start_args[3:], *args, "--resume")
    refused(1, "--optimizer", *start_args, *args, "--resume", "--optimizer", "adam")
    refused(1, "--steps", *start_args, "--steps", "1", "--resume")
    for option, value in [("--beta1", "0.5"), ("--weight-decay", "0.5"), ("--eps", "1e-3"), ("--clip", "9"), ("--warmup", "3")]:
        out = run(*start_args, *args, "--resume", option, value)[0]
        assert "warning: %s was" % option in out, out
    out = run(*start_args, *args, "--resume")[0]
    assert "warning" not in out, out


def test_two_runs_on_one_out(p):
    child = start(p, p.at("shared"), "--steps", "100000", "--log", p.at("shared.jsonl"), "--checkpoint-every", "5")
    try:
        wait_for_step(p.at("shared.jsonl"), 6, child)
        refused(1, "another run", *base(p, "shared"))
        refused(1, "another run", *base(p, "shared"), "--resume")
    finally:
        child.terminate()
        child.communicate(timeout=60)
    assert child.returncode == 0
    run("export", "--checkpoint", p.at("shared"), "--out", p.at("shared-model"))


def test_closed_streams_and_a_gone_model(p):
    os.makedirs(p.at("disk"))
    command = '"$0" "$@" <&- >&- 2>&-'
    args = base(p, "closed") + ["--log", p.at("closed.jsonl"), "--nvme", p.at("disk"), *NVME]
    assert subprocess.run(["sh", "-c", command, STOKER] + args, timeout=60).returncode == 0
    run(*base(p, "open"))
    assert len(log(p.at("closed.jsonl"))) == 2
    assert read(p.at("closed", "model.safetensors")) == read(p.at("open", "model.safetensors"))
    gone = make_model(p.root, "gone")
    child = subprocess.Popen([STOKER, "train", "--model", gone, "--data", p.data, "--out", p.at("kept"), "--steps", "200", *SMALL,
                              "--log", p.at("gone.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_step(p.at("gone.jsonl"), 2, child)
    shutil.rmtree(gone)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and b"is gone" in out, err
    assert os.path.exists(p.at("kept", "model.safetensors"))


def test_file_size_limit_is_a_sentence(p):
    if "TSAN_OPTIONS" in os.environ:
        skip("the thread sanitizer's own files are beyond the limit")
    done = subprocess.run(["sh", "-c", 'ulimit -f 10; exec "$0" "$@"', STOKER] + base(p, "limited"), stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done
    assert not os.path.exists(p.at("limited", "model.safetensors"))


def test_ckp_37_a_log_that_is_full_does_not_end_the_run(p):
    _, err = run(*base(p, "unlogged"), "--log", "/dev/full")
    assert len(err.strip().splitlines()) == 1 and "ALARM" in err and "goes on without the log" in err, err
    assert os.path.exists(p.at("unlogged", "model.safetensors"))


def test_result_that_is_no_number(p):
    bad = p.at("nan")
    shutil.copytree(p.model, bad)
    path = os.path.join(bad, "model.safetensors")
    tensors = read_st(path)
    dtype, shape, raw = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (dtype, shape, b"\xc0\x7f" * (len(raw) // 2))
    write_st(path, tensors)
    run("eval", "--model", bad, "--data", p.data, "--seq", "32", "--json", p.at("nan.json"))
    with open(p.at("nan.json")) as f:
        assert json.load(f)["loss"] is None


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
