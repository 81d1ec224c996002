#!/usr/bin/env python3
"""Durable steps through the command: kill -9 anywhere, --resume, --discard, inspect.

Kills come at a line of the run's own log or after a delay; both are drawn from a seed that is printed
(STK_SEED), and nothing is judged by time.  STK_SOAK=1: 300 kills.
"""

import glob
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time

from cli_common import SMALL, STOKER, log, read, refused, run, run_tests, sanitized, skip, write

SEED = int(os.environ.get("STK_SEED", "20261130"), 0)
KILLS = 300 if os.environ.get("STK_SOAK") else 4 if sanitized() else 12
STEPS = 10
KILL_STEPS = 24
FIXED = ["--warmup", "2"]  # of a length that may change when a run goes on


def weights(p, out):
    return read(p.at(out, "model.safetensors"))


def reference(p, steps=STEPS):
    name = "durable-reference-%d" % steps
    if not os.path.exists(p.at(name)):
        p.train(name, "--steps", steps, *FIXED)
    return weights(p, name)


def folders(p, *names):
    """--nvme options for new folders."""
    options = []
    for name in names:
        os.makedirs(p.at(name), exist_ok=True)
        options += ["--nvme", p.at(name)]
    return options


def arguments(p, out, *more):
    return [STOKER, "train", "--model", p.model, "--data", p.data, "--out", p.at(out), *SMALL, *FIXED, *map(str, more)]


def start(p, out, *more):
    with open(p.at(out + ".out"), "ab") as text:
        return subprocess.Popen(arguments(p, out, *more), stdout=text, stderr=subprocess.STDOUT)


def lines_of(path):
    """Whole lines of a log that may be growing."""
    if not os.path.exists(path):
        return []
    return [json.loads(x) for x in read(path).decode().split("\n")[:-1] if x]


def kill_when(child, path, wanted, delay=0):
    """Kills the child `delay` s after its log satisfies `wanted`; false: it ended before."""
    end = time.monotonic() + 120
    while child.poll() is None and not wanted(lines_of(path)):
        assert time.monotonic() < end, "the run never got there: %s" % path
        time.sleep(0.002)
    time.sleep(delay)
    alive = child.poll() is None
    child.kill()
    child.wait()
    return alive


def dead_run(p, out, nvme, durable=2, step=4, *more):
    """A run that was killed once its durable step is at least `step`.  Returns what its log ends with."""
    child = start(p, out, "--steps", 1000000, *nvme, "--durable", durable, "--log", p.at(out + ".jsonl"), *more)
    assert kill_when(child, p.at(out + ".jsonl"), lambda x: x and x[-1]["durable_step"] >= step), read(p.at(out + ".out"))
    return lines_of(p.at(out + ".jsonl"))[-1]


def left_in(*paths):
    return [x for path in paths for x in glob.glob(os.path.join(path, "stoker-run-*"))]


def last_step(p, out):
    return lines_of(p.at(out + ".jsonl"))[-1]["step"]


# --- a run that ends --------------------------------------------------------------------------------------------------

def test_a_whole_run_leaves_nothing_and_logs_its_durable_steps(p):
    for i, more in enumerate([["--update", "chase"], ["--update", "serial"]]):
        name = "whole%d" % i
        out, _ = p.train(name, "--steps", STEPS, *FIXED, *folders(p, "nvme-whole"), "--durable", 3, "--log", p.at(name + ".jsonl"), *more)
        assert weights(p, name) == reference(p)
        assert os.listdir(p.at("nvme-whole")) == [] and not os.path.exists(p.at(name, "run.json"))
        steps = [x["durable_step"] for x in log(p.at(name + ".jsonl"))]
        assert steps[:3] == [0, 0, 0] and steps[-1] >= 6 and all(s % 3 == 0 for s in steps) and steps == sorted(steps), steps
        assert "durable    every 3 steps" in out and "second versions for durable steps" in out


def test_a_simulated_run_with_durable_steps_replays(p):
    sim = ["--storage", "sim", "--durable", "2", "--simulate"]
    traces = []
    for i, seed in enumerate([5, 5]):
        out, _ = p.train("simd%d" % i, "--steps", STEPS, *FIXED, *sim, seed)
        traces.append([x for x in out.splitlines() if x.startswith("trace")])
        assert weights(p, "simd%d" % i) == reference(p)
    assert traces[0] == traces[1] and traces[0]


def test_a_signal_writes_the_checkpoint_and_drops_the_durable_steps(p):
    nvme = folders(p, "nvme-term")
    child = start(p, "term", "--steps", 1000000, *nvme, "--durable", 1, "--log", p.at("term.jsonl"))
    while not [x for x in lines_of(p.at("term.jsonl")) if x["durable_step"] > 1]:
        assert child.poll() is None
        time.sleep(0.002)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    last = last_step(p, "term")
    assert os.listdir(p.at("term")) == ["checkpoints"] and os.listdir(p.at("nvme-term")) == []
    out, _ = p.train("term", "--steps", last + 1, *FIXED, *nvme, "--durable", 1, "--resume")
    assert "resumed from %s" % p.at("term", "checkpoints") in out
    assert weights(p, "term") == reference(p, last + 1)


# --- folders that go during the run -----------------------------------------------------------------------------------

def wait_until(child, what, why):
    end = time.monotonic() + 120
    while not what():
        assert child.poll() is None and time.monotonic() < end, why
        time.sleep(0.002)


def test_a_folder_removed_during_the_run_is_an_alarm(p):
    """Open files live on without a name: what is written there is found by nobody, so no step counts as durable."""
    nvme = folders(p, "nvme-removed")
    child = start(p, "removed", "--steps", 1000000, *nvme, "--durable", 2, "--log", p.at("removed.jsonl"))
    wait_until(child, lambda: [x for x in lines_of(p.at("removed.jsonl")) if x["durable_step"] >= 4], "no durable step")
    os.rename(p.at("nvme-removed"), p.at("nvme-elsewhere"))
    shutil.rmtree(p.at("nvme-elsewhere"))
    wait_until(child, lambda: b"ALARM" in read(p.at("removed.out")), "no alarm")
    at = last_step(p, "removed")
    wait_until(child, lambda: last_step(p, "removed") >= at + 4, "the run goes on")
    child.kill()
    child.wait()
    text = read(p.at("removed.out")).decode()
    alarm = [x for x in text.splitlines() if "ALARM" in x][0]
    assert p.at("nvme-removed", "stoker-run-") in alarm and "moved away" in alarm and "cannot be found either" in alarm, alarm
    assert lines_of(p.at("removed.jsonl"))[-1]["durable_step"] == 0
    refused(1, ["run.json", "nvme-removed", "--discard"], *arguments(p, "removed", "--steps", 5, *nvme, "--resume")[1:])


def test_a_folder_locked_up_during_the_run_is_named(p):
    """What cannot be removed at the end is named, and run.json stays until it can."""
    if os.geteuid() != 0:
        skip("needs to become another user")
    user = 20000 + os.getpid() % 30000
    nvme = folders(p, "nvme-locked")
    os.makedirs(p.at("locked-out"), exist_ok=True)
    for path in (p.at("nvme-locked"), p.at("locked-out")):
        os.chown(path, user, user)
    for path in (p.root, p.model, p.data, *(os.path.join(p.model, x) for x in os.listdir(p.model))):
        os.chmod(path, 0o755)

    def other():
        os.setgid(user)
        os.setuid(user)

    def command(out, *more):
        return arguments(p, "locked-out/" + out, "--steps", 60, *nvme, *more)

    for name, durable in [("durable", ["--durable", "2"]), ("plain", ["--params", "nvme", "--optimizer-state", "nvme"])]:
        log_file = p.at("locked-out", name + ".jsonl")
        try:
            child = subprocess.Popen(command(name, *durable, "--log", log_file), stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, preexec_fn=other)
        except (subprocess.SubprocessError, PermissionError):
            skip("this user cannot reach the program")
        wait_until(child, lambda: lines_of(log_file), "no step")
        os.chmod(p.at("nvme-locked"), 0)
        out, err = (x.decode() for x in child.communicate(timeout=120))
        assert child.returncode == 0, err
        folder = left_in(p.at("nvme-locked"))[0]
        assert "ALARM" in err and folder in err and "Permission denied" in err, err
        assert len([x for x in err.splitlines() if "ALARM: step" in x and folder in x]) <= 2, err  # not at length each time
        assert os.path.exists(p.at("locked-out", name, "run.json")) == (name == "durable"), out
        again = command(name, "--resume")
        if name == "durable":
            assert "run.json is kept" in out, out
            done = subprocess.run(again, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=other)
            assert done.returncode == 1 and folder.encode() in done.stderr and b"--discard" in done.stderr, done.stderr
        os.chmod(p.at("nvme-locked"), 0o755)
        if name == "durable":
            done = subprocess.run(again, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=other)
            assert not left_in(p.at("nvme-locked")) and not os.path.exists(p.at("locked-out", name, "run.json")), done
        else:
            done = subprocess.run(command("later", *durable), stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=other)
            assert done.returncode == 0 and not left_in(p.at("nvme-locked")), done


def damage_until_it_ends(child, path):
    """Once may be too little: what is in memory just then is written again before it is read."""
    block = mmap.mmap(-1, 4096)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)  # the page cache would get in the way of the run's own writes
    except OSError:
        fd = os.open(path, os.O_RDWR)
    for _ in range(200):
        child.send_signal(signal.SIGSTOP)
        for at in range(0, os.fstat(fd).st_size, 4096):  # the name may be gone: it is ending
            block[:] = os.urandom(4096)
            os.pwritev(fd, [block], at)
        child.send_signal(signal.SIGCONT)
        try:
            child.wait(0.5)
            break
        except subprocess.TimeoutExpired:
            pass
    os.close(fd)
    if child.returncode is not None:
        return child.returncode
    child.kill()
    raise AssertionError("the damage was never noticed")


def test_what_is_left_after_a_damaged_read_is_true(p):
    """A checksum error names what there is to go on from, and what would have helped."""
    for name, more, words in [
            ("nothing", [], ["nothing is left", "--checkpoint-every", "--durable"]),
            ("saved", ["--checkpoint-every", 2], ["checkpoint of step", "--resume"]),
            ("lasting", ["--durable", 2], ["durable step", "--resume", "no checkpoint"])]:
        nvme = folders(p, "nvme-flip-" + name)
        log_file = p.at("flip-%s.jsonl" % name)
        child = start(p, "flip-" + name, "--steps", 1000000, *nvme, "--params", "nvme", "--optimizer-state", "nvme", *more,
                      "--log", log_file)
        wait_until(child, lambda: len(lines_of(log_file)) > 4 and (name != "lasting" or lines_of(log_file)[-1]["durable_step"]),
                   "no steps")
        path = glob.glob(p.at("nvme-flip-" + name, "stoker-run-*", "extents-0.bin"))[0]
        assert damage_until_it_ends(child, path) == 1
        said = [x for x in read(p.at("flip-%s.out" % name)).decode().splitlines() if "checksum" in x]
        assert said and all(w in said[-1] for w in words) and "from a checkpoint" not in said[-1], said


# --- a run that died --------------------------------------------------------------------------------------------------

def test_resume_takes_the_newer_and_says_which(p):
    nvme = folders(p, "nvme-newer")
    last = dead_run(p, "newer", nvme, 2, 6, "--checkpoint-every", "3")
    steps = last["step"] + 3
    out, _ = p.train("newer", "--steps", steps, *FIXED, *nvme, "--durable", "2", "--resume", "--log", p.at("newer.jsonl"))
    line = [x for x in out.splitlines() if x.startswith("resumed from")][0]
    checkpoint = "checkpoints/step-" in line
    assert ("the durable step is older" in line) if checkpoint else ("the newest checkpoint is of step" in line), line
    assert weights(p, "newer") == reference(p, steps)
    assert not left_in(p.at("nvme-newer")) and not os.path.exists(p.at("newer", "run.json"))
    # a checkpoint alone, then a durable step alone
    nvme = folders(p, "nvme-only")
    last = dead_run(p, "only", nvme, 1, 2)
    steps = last["step"] + 2
    out, _ = p.train("only", "--steps", steps, *FIXED, *nvme, "--resume")
    assert "resumed from the durable step" in out and "there is no checkpoint" in out
    assert weights(p, "only") == reference(p, steps), (steps, last, out)
    assert not left_in(p.at("nvme-only"))


def test_a_newer_checkpoint_over_the_durable_store(p):
    """Without --durable the store is left alone until the run is complete, with it it is taken over."""
    for i, more in enumerate([[], ["--durable", "4"]]):
        name = "over%d" % i
        nvme = folders(p, "nvme-" + name)
        child = start(p, name, "--steps", 1000000, *nvme, "--durable", 400, "--checkpoint-every", "405", "--log", p.at(name + ".jsonl"))
        newest = p.at(name, "checkpoints", "step-00000405", "manifest.json")
        assert kill_when(child, p.at(name + ".jsonl"), lambda x: os.path.exists(newest)), read(p.at(name + ".out"))
        steps = 408
        out, _ = p.train(name, "--steps", steps, *FIXED, *nvme, "--resume", *more)
        assert "step-00000405" in out and "the durable step is older (400)" in out, out
        assert weights(p, name) == reference(p, steps)
        assert not left_in(p.at("nvme-" + name)) and not os.path.exists(p.at(name, "run.json"))


def test_starting_over_a_durable_step_is_refused(p):
    nvme = folders(p, "nvme-refused")
    dead_run(p, "refused", nvme)
    before = left_in(p.at("nvme-refused"))
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("refused"), *SMALL, *FIXED, "--steps", "5"]
    refused(1, ["--resume", "--discard", "durable step", p.at("nvme-refused")], *base, *nvme)
    refused(1, ["--resume", "--discard", "durable step", p.at("nvme-refused")], *base)  # run.json knows where
    refused(1, ["--nvme", p.at("nvme-refused"), "--discard"], *base, "--resume")
    last = last_step(p, "refused") + 2
    base[base.index("--steps") + 1] = str(last)
    refused(1, ["--chunk 524288"], *base, *nvme, "--resume", "--chunk", "4096")
    refused(1, ["NVMe", "params"], *base, *nvme, "--resume", "--params", "host", "--optimizer-state", "nvme")
    refused(1, ["--freeze"], *base, *nvme, "--resume", "--freeze", "model.embed*")
    refused(1, ["--nvme"], *base, *nvme, *folders(p, "nvme-more"), "--resume")
    refused(1, ["--seed"], *base, *nvme, "--resume", "--seed", "5")
    assert left_in(p.at("nvme-refused")) == before
    out, _ = run(*base, *nvme, "--resume", "--dry-run")
    assert left_in(p.at("nvme-refused")) == before
    run(*base, *nvme, "--resume")
    assert weights(p, "refused") == reference(p, last)


def test_discard_alone_and_with_resume(p):
    nvme = folders(p, "nvme-discard")
    dead_run(p, "discard", nvme)
    out, _ = p.train("discard", "--steps", "5", *FIXED, *nvme, "--discard")
    assert "discarded  the durable step" in out and weights(p, "discard") == reference(p, 5)
    assert not left_in(p.at("nvme-discard")) and not os.path.exists(p.at("discard", "run.json"))
    # back to the checkpoint
    dead_run(p, "back", nvme, 1, 6, "--checkpoint-every", "4", "--checkpoint", "sync")  # there once its step is logged
    checkpoints = sorted(os.listdir(p.at("back", "checkpoints")))
    newest = int([x for x in checkpoints if x.startswith("step-")][-1][5:])
    steps = newest + 1
    out, _ = p.train("back", "--steps", steps, *FIXED, *nvme, "--discard", "--resume")
    assert "discarded" in out and "resumed from %s" % p.at("back", "checkpoints") in out
    assert weights(p, "back") == reference(p, steps) and not left_in(p.at("nvme-discard"))
    # nothing to go back to: nothing is dropped
    dead_run(p, "nothing", nvme, 1, 2)
    refused(1, "no complete checkpoint", "train", "--model", p.model, "--data", p.data, "--out", p.at("nothing"), *SMALL, *FIXED,
            "--steps", "100000", *nvme, "--discard", "--resume")
    assert left_in(p.at("nvme-discard"))
    p.train("nothing", "--steps", "3", *FIXED, "--discard")  # found by run.json alone
    assert not left_in(p.at("nvme-discard"))
    out, _ = p.train("discard-none", "--steps", "3", *FIXED, "--discard")
    assert "nothing was left" in out


def test_discard_drops_nothing_when_the_run_is_refused(p):
    """Also by the engine, which plans before anything goes: budgets, memory, places."""
    nvme = folders(p, "nvme-kept")
    dead_run(p, "kept", nvme)
    before = left_in(p.at("nvme-kept"))
    base = arguments(p, "kept", "--steps", "5", *nvme, "--discard")[1:]
    refused(1, "host", *base, "--host-memory", "1M")
    assert left_in(p.at("nvme-kept")) == before and os.path.exists(p.at("kept", "run.json"))
    run("inspect", p.at("kept"))
    run(*base)
    assert not left_in(p.at("nvme-kept")) and weights(p, "kept") == reference(p, 5)


def test_discard_without_run_json_names_what_lies_there(p):
    """Nobody knows whose it is: it stays, and the sentence says which folders to remove by hand."""
    nvme = folders(p, "nvme-l0", "nvme-l1")
    dead_run(p, "lost", nvme)
    stores = left_in(p.at("nvme-l0"), p.at("nvme-l1"))
    os.remove(p.at("lost", "run.json"))
    out, _ = run(*arguments(p, "lost", "--steps", "5", *nvme, "--discard")[1:])
    assert len(stores) == 2 and left_in(p.at("nvme-l0"), p.at("nvme-l1")) == stores
    for folder in stores:
        line = [x for x in out.splitlines() if folder in x and x.startswith("--discard")]
        assert len(line) == 1 and "remove that folder by hand" in line[0], out
        shutil.rmtree(folder)


def test_discard_removes_what_is_there_and_says_what_is_not(p):
    """A folder of --nvme gone for good, all of them, a lock that is a folder, a file that is not ours."""
    nvme = folders(p, "nvme-g0", "nvme-g1")
    dead_run(p, "gone", nvme)
    shutil.rmtree(p.at("nvme-g1"))
    out, _ = run(*arguments(p, "gone", "--steps", "5", *nvme[:2], "--discard")[1:])
    assert "--discard: %s is not there: should it come back, remove %s/stoker-run-" % (p.at("nvme-g1"), p.at("nvme-g1")) in out, out
    assert "discarded" in out and not left_in(p.at("nvme-g0")) and weights(p, "gone") == reference(p, 5)

    nvme = folders(p, "nvme-g2")
    dead_run(p, "gone2", nvme)
    shutil.rmtree(p.at("nvme-g2"))
    out, _ = run(*arguments(p, "gone2", "--steps", "5", "--discard")[1:])
    assert "%s is not there" % p.at("nvme-g2") in out, out
    assert not os.path.exists(p.at("gone2", "run.json")), "it would be asked for again"

    for i, change in enumerate(["empty", "full", "foreign"]):
        name, nvme = "gone-lock%d" % i, folders(p, "nvme-h%d" % i)
        dead_run(p, name, nvme)
        folder = left_in(p.at("nvme-h%d" % i))[0]
        lock = os.path.join(folder, "lock")
        if change != "foreign":
            os.remove(lock)
            os.mkdir(lock)
        if change != "empty":
            write(os.path.join(lock if change == "full" else folder, "mine"), "x")
        out, _ = run(*arguments(p, name, "--steps", "5", *nvme, "--discard")[1:])
        assert "discarded" in out and weights(p, name) == reference(p, 5), out
        if change != "empty":
            assert folder in out and "by hand" in out, out
            assert not glob.glob(os.path.join(folder, "extents-*")) and not os.path.exists(os.path.join(folder, "table.bin"))
        assert bool(left_in(p.at("nvme-h%d" % i))) == (change != "empty")


def test_a_table_cut_short_is_named(p):
    """On either path: its name, its size and the one expected; the other path's file is not blamed."""
    nvme = folders(p, "nvme-t0", "nvme-t1")
    last = dead_run(p, "tables", nvme)["step"]
    base = arguments(p, "tables", "--steps", last + 2, *nvme, "--resume")[1:]
    tables = [os.path.join(x, "table.bin") for x in left_in(p.at("nvme-t0"), p.at("nvme-t1"))]
    for table in tables:
        size = os.path.getsize(table)
        shutil.copy(table, p.at("saved"))
        for left in [100, size // 2, size - 512]:
            os.truncate(table, left)
            refused(1, [table, "has %d bytes, %d are expected" % (left, size), "cut short"], *base)
            shutil.copy(p.at("saved"), table)
    run(*base)
    assert weights(p, "tables") == reference(p, last + 2)


def test_options_are_checked(p):
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("options"), *SMALL, "--steps", "5"]
    refused(2, "--durable", *base, "--durable", "0", *folders(p, "nvme-options"))
    refused(2, "--nvme", *base, "--durable", "2")
    refused(2, "--params", *base, "--durable", "2", *folders(p, "nvme-options"), "--params", "host")
    refused(2, "--optimizer-state", *base, "--durable", "2", *folders(p, "nvme-options"), "--optimizer-state", "host")
    assert not os.path.exists(p.at("options"))


def test_inspect_says_what_is_durable(p):
    nvme = folders(p, "nvme-inspect")
    dead_run(p, "inspect", nvme, 2, 4, "--checkpoint-every", "3")
    stores = left_in(p.at("nvme-inspect"))
    for path in [p.at("inspect"), p.at("nvme-inspect"), stores[0]]:
        out, _ = run("inspect", path)
        assert "durable step" in out and os.path.basename(stores[0])[len("stoker-run-"):] in out and "--resume" in out, (path, out)
    assert "checkpoint" in run("inspect", p.at("inspect"))[0]
    # alive
    child = start(p, "inspect2", "--steps", 1000000, *nvme, "--durable", 1, "--log", p.at("inspect2.jsonl"))
    while not lines_of(p.at("inspect2.jsonl")):
        assert child.poll() is None
        time.sleep(0.002)
    out, _ = run("inspect", p.at("nvme-inspect"))
    child.kill()
    child.wait()
    assert out.count("stoker-run-") >= 2 and ("live" in out or "use" in out), out
    shutil.rmtree(p.at("nvme-inspect"))


# --- several folders, missing ones, damage ----------------------------------------------------------------------------

def test_folders_in_another_order_and_one_missing(p):
    names = ["nvme-f%d" % i for i in range(3)]
    nvme = folders(p, *names)
    last = dead_run(p, "several", nvme)
    steps = last["step"] + 2
    turned = folders(p, names[2], names[0], names[1])
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("several"), *SMALL, *FIXED, "--steps", steps]
    refused(1, [p.at(names[2])], *base, *folders(p, names[0], names[1]), "--resume")
    os.rename(p.at(names[1]), p.at("away"))
    refused(1, [p.at(names[1])], *base, *nvme, "--resume")
    refused(1, [p.at(names[1])], *base, "--nvme", p.at(names[0]), "--nvme", p.at(names[2]), "--resume")
    os.rename(p.at("away"), p.at(names[1]))
    run(*base, *turned, "--resume")
    assert weights(p, "several") == reference(p, steps)
    assert not left_in(*[p.at(n) for n in names])


def damage(path, at=None):
    with open(path, "r+b") as f:
        size = os.path.getsize(path)
        for offset in at if at is not None else range(0, size, 512):
            f.seek(offset)
            f.write(b"\xa5" * 16)


def test_damaged_tables_and_extents(p):
    nvme = folders(p, "nvme-d0", "nvme-d1")
    last = dead_run(p, "damaged", nvme)
    steps = last["step"] + 2
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("damaged"), *SMALL, *FIXED, "--steps", steps]
    stores = left_in(p.at("nvme-d0"), p.at("nvme-d1"))
    assert len(stores) == 2
    # one path's table is enough
    saved = read(os.path.join(stores[0], "table.bin"))
    damage(os.path.join(stores[0], "table.bin"))
    run(*base, *nvme, "--resume", "--dry-run")
    # none is not
    damage(os.path.join(stores[1], "table.bin"))
    refused(1, ["table.bin", "--discard begins anew: there is no checkpoint"], *base, *nvme, "--resume")
    refused(1, ["table.bin", "--discard"], *base, *nvme)
    assert "table.bin" in run("inspect", p.at("damaged"))[0]
    assert len(left_in(p.at("nvme-d0"), p.at("nvme-d1"))) == 2, "a damaged store is not removed unasked"
    # extents: found when they are read, named
    with open(os.path.join(stores[0], "table.bin"), "wb") as f:
        f.write(saved)
    extents = glob.glob(os.path.join(stores[0], "extents-*.bin"))[0]
    size = os.path.getsize(extents)
    damage(extents, range(0, size, 2048))
    refused(1, ["chunk", "extents-", "tries the durable step", "--discard begins anew: there is no checkpoint"], *base, *nvme, "--resume")
    damage(os.path.join(stores[0], "table.bin"))
    out, _ = run(*base, *nvme, "--discard")
    assert "discarded" in out and weights(p, "damaged") == reference(p, steps)
    assert not left_in(p.at("nvme-d0"), p.at("nvme-d1"))


def test_damage_names_the_checkpoint_to_go_on_from(p):
    """A byte flipped, or a file cut, under a durable step that is newer than the newest checkpoint: one sentence with both."""
    nvme = folders(p, "nvme-flip")
    last = dead_run(p, "flipped", nvme, 2, 8, "--checkpoint-every", "3")
    steps = {int(x[-8:]): x for x in glob.glob(p.at("flipped", "checkpoints", "step-????????"))}
    saved = max(s for s in steps if s <= last["saved_step"] and s < last["durable_step"])
    for s in [s for s in steps if s > saved]:
        shutil.rmtree(steps[s])
    base = ["train", "--model", p.model, "--data", p.data, "--out", p.at("flipped"), *SMALL, *FIXED, *nvme, "--steps", last["step"] + 2]
    store = left_in(p.at("nvme-flip"))[0]
    words = ["--resume --discard goes on from the checkpoint of step %d" % saved]
    for name, change in (("table.bin", damage), ("extents-0.bin", lambda x: damage(x, range(0, os.path.getsize(x), 2048))),
                         ("extents-0.bin", lambda x: os.truncate(x, os.path.getsize(x) // 2))):
        path = os.path.join(store, name)
        shutil.copy(path, path + ".whole")
        change(path)
        refused(1, [name, *words], *base, "--resume")
        os.replace(path + ".whole", path)
    damage(os.path.join(store, "table.bin"))
    out, _ = run(*base, "--resume", "--discard")
    assert "step-%08d" % saved in [x for x in out.splitlines() if x.startswith("resumed from")][0], out
    assert weights(p, "flipped") == reference(p, last["step"] + 2)


def test_what_is_damaged_is_one_sentence(p):
    """Table or extents cut short, gone or a pipe; run.json no JSON: one sentence that says what to do, nothing touched."""
    nvme = folders(p, "nvme-hurt")
    last = dead_run(p, "hurt", nvme, 2, 4)["step"]
    base = arguments(p, "hurt", "--steps", last + 2, *nvme, "--resume")[1:]
    folder = left_in(p.at("nvme-hurt"))[0]

    def damaged(path, words, change):
        os.rename(path, path + ".away")
        change(path)
        refused(1, words, *base)
        _, err = run("inspect", p.at("nvme-hurt"))
        assert err == "", err
        os.remove(path) if os.path.exists(path) else None
        os.rename(path + ".away", path)

    def cut(path):
        shutil.copy(path + ".away", path)
        os.truncate(path, os.path.getsize(path) // 2)

    damaged(os.path.join(folder, "extents-0.bin"), ["extents-0.bin", "discard"], cut)
    damaged(p.at("hurt", "run.json"), ["run.json", "put it back"], lambda x: write(x, "{"))
    table = os.path.join(folder, "table.bin")
    damaged(table, ["table.bin", "cannot be read", "--discard"], os.mkfifo)
    os.rename(p.at("nvme-hurt"), p.at("nvme-away"))  # not mounted today
    refused(1, ["run.json", "nvme-hurt", "--discard"], *base[:-3], "--resume")
    os.rename(p.at("nvme-away"), p.at("nvme-hurt"))
    if os.getuid() != 0:
        os.chmod(os.path.join(folder, "lock"), 0)
        refused(1, ["lock", "permissions"], *base)
        os.chmod(os.path.join(folder, "lock"), 0o644)
    run(*base)
    assert weights(p, "hurt") == reference(p, last + 2)


def test_a_checkpoint_cut_short_by_a_kill(p):
    """Is none to go on from, none that a new run must not meet, and gone when the run is complete."""
    for name, nvme in [("cut-short", []), ("cut-short-durable", [*folders(p, "nvme-cut"), "--durable", "2"])]:
        partial = p.at(name, "checkpoints", ".partial-step-00000003")
        os.makedirs(partial)
        write(os.path.join(partial, "state-00001.safetensors"), "part")
        p.train(name, "--steps", STEPS, *FIXED, *nvme)
        assert weights(p, name) == reference(p) and not os.path.exists(p.at(name, "checkpoints"))


def test_a_kill_just_before_the_end(p):
    """The model is complete, the store gone, run.json not yet: the next run takes it away and says what is there."""
    p.train("nearly", "--steps", STEPS, *FIXED)
    os.makedirs(p.at("nvme-nearly"))
    write(p.at("nearly", "run.json"), json.dumps({"run_id": "0" * 16, "nvme": [p.at("nvme-nearly")], "discard": True}))
    refused(1, ["--resume", "the model in --out is complete"], *arguments(p, "nearly", "--steps", STEPS, "--resume")[1:],
            absent=[p.at("nearly", "run.json")])
    assert weights(p, "nearly") == reference(p)


# --- kill -9 anywhere -------------------------------------------------------------------------------------------------

def went_on(p, out, options):
    """The run after a death, to its end: resumed, or begun again where nothing had been kept."""
    done = subprocess.run(arguments(p, out, *options, "--resume"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    if done.returncode == 0:
        return "resumed" + (" from the durable step" if b"from the durable step" in done.stdout else " from a checkpoint")
    text = done.stderr.decode()
    assert "no complete checkpoint" in text, text
    if os.path.exists(p.at(out, "config.json")):  # died after its model was complete
        return "complete"
    done = subprocess.run(arguments(p, out, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return "begun again"


def test_kill_9_at_random_moments(p):
    rng = random.Random(SEED)
    want = reference(p, KILL_STEPS)
    nvme = [folders(p, "nvme-k0"), folders(p, "nvme-k1", "nvme-k2")]
    took = time.monotonic()
    p.train("kill-time", "--steps", KILL_STEPS, *FIXED, *nvme[0], "--durable", 1)
    took = time.monotonic() - took  # only the range that delays are drawn from
    seen, kills, k = {}, 0, -1
    while kills < KILLS:
        k += 1
        name, seed = "kill%d" % k, rng.randrange(1 << 32)
        r = random.Random(seed)
        options = ["--steps", KILL_STEPS, *nvme[k % 2], "--durable", r.randint(1, 3), "--checkpoint-every", r.choice([4, 7, 1000]),
                   "--update", r.choice(["serial", "chase"]), "--log", p.at(name + ".jsonl")]
        for _ in range(r.randint(1, 3)):  # some die several times
            resume = ["--resume"] if os.path.exists(p.at(name, "run.json")) or glob.glob(p.at(name, "checkpoints", "step-*")) else []
            child = start(p, name, *options, *resume)
            if r.random() < 0.6:
                last = r.random() < 0.3  # and into the export, the removal, the exit
                step, delay = KILL_STEPS if last else r.randint(2, KILL_STEPS), r.uniform(0, took / KILL_STEPS * (4 if last else 1))
                alive = kill_when(child, p.at(name + ".jsonl"), lambda x: x and x[-1]["step"] >= step, delay)
                what = "%.4f s after the line of step %d" % (delay, step)
            else:
                delay = r.uniform(0, took)
                time.sleep(delay)
                alive = child.poll() is None
                child.kill()
                child.wait()
                what = "after %.4f s" % delay
            kills += alive
            if not alive:
                break
        try:
            how = went_on(p, name, options)
            assert weights(p, name) == want, "other weights"
            assert how == "complete" or not left_in(*[x for x in nvme[k % 2] if x != "--nvme"]), "swap files were left"
        except AssertionError as e:
            raise AssertionError("kill %d (seed %d, STK_SEED %d), the last %s: %s" % (k, seed, SEED, what, e))
        how = how if alive else how + " after its end"
        seen[how] = seen.get(how, 0) + 1
        for x in glob.glob(p.at(name) + "*"):
            shutil.rmtree(x) if os.path.isdir(x) else os.remove(x)
    print("# seed %d, %d kills: %s" % (SEED, kills, ", ".join("%s %d" % x for x in sorted(seen.items()))))


run_tests(sys.modules[__name__])
