#!/usr/bin/env python3
"""The example examples/c/swap.c as a user runs it: a working set of ten times the memory, every byte checked, memory as
promised, and kill -9 at any moment.  Prints TAP; argument: the program."""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback

SWAP = sys.argv.pop(1)
SEED = int(os.environ.get("STK_SEED", "20261130"))
# Beside the buffers and one item: tables, rings, stacks, and pages of libraries that are touched first during the run.
CONSTANT_MIB = 6


class Skip(Exception):
    pass


def sanitized():
    with open(SWAP, "rb") as f:
        return re.search(rb"__[at]san_init", f.read()) is not None


def swap(folder, *args, code=0):
    done = subprocess.run([SWAP, *map(str, args), folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == code, "exit %d: %s%s" % (done.returncode, done.stdout.decode(), done.stderr.decode())
    return done.stdout.decode(), done.stderr.decode()


def test_ten_times_the_memory_and_every_byte_right():
    with tempfile.TemporaryDirectory() as folder:
        out, _ = swap(folder, "--memory", 16, "--passes", 3)
        print("# " + out.strip().replace("\n", "\n# "))
        assert "every byte was right" in out
        size = float(re.search(r"items, (\d+) MiB in 16 MiB", out).group(1))
        assert size >= 160, size
        since = float(re.search(r"peak memory [\d.]+ MiB, ([\d.]+) of it since the start", out).group(1))
        assert sanitized() or since <= 16 + CONSTANT_MIB, "%.1f MiB were taken, 16 were said" % since
        hits, gets = map(int, re.search(r"(\d+) of (\d+) gets found a buffer", out).groups())
        assert hits > gets * 0.3, "%d of %d gets found a buffer" % (hits, gets)
        assert os.listdir(folder) == [], "left behind: %s" % os.listdir(folder)


def test_two_folders_share_the_items():
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, p) for p in "ab"]
        for path in paths:
            os.mkdir(path)
        out, _ = swap(paths[0], "--memory", 4, "--times", 12, "--passes", 2, paths[1])
        assert "2 paths" in out and "every byte was right" in out, out
        assert os.listdir(paths[0]) == os.listdir(paths[1]) == []


def test_refusals_are_sentences():
    with tempfile.TemporaryDirectory() as folder:
        _, err = swap(os.path.join(folder, "none"), code=1)
        assert "none" in err and len(err.strip().splitlines()) == 1, err
        _, err = swap(folder, "--memory", 0, code=2)
        assert "usage" in err
        _, err = swap(folder, "--wrong", code=2)
        assert "usage" in err


def test_memory_limit_of_a_cgroup_is_kept():
    """The kernel kills what takes more: 16 MiB said, 16 + constant + the program itself allowed."""
    if sanitized():
        raise Skip("a sanitizer takes memory of its own")
    group = "/sys/fs/cgroup/memory/stoker-swap-%d" % os.getpid()
    try:
        os.mkdir(group)
    except OSError as e:
        raise Skip("no cgroup v1 memory controller here: %s" % e)
    try:
        with open(group + "/memory.limit_in_bytes", "w") as f:
            f.write(str((16 + CONSTANT_MIB + 16) << 20))
        with tempfile.TemporaryDirectory() as folder:
            def enter():
                with open(group + "/tasks", "w") as f:
                    f.write(str(os.getpid()))
            done = subprocess.run([SWAP, "--memory", "16", "--passes", "2", folder], preexec_fn=enter, timeout=120,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert done.returncode == 0, "exit %d: %s" % (done.returncode, done.stdout.decode())
    finally:
        os.rmdir(group)


def test_kill_9_and_resume():
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        args = [SWAP, "--memory", "4", "--times", "10", "--passes", "14", "--durable"]
        reached, killed = 0, 0
        for life in range(6):
            more = ["--resume"] if life else []
            with subprocess.Popen(args + more + [folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
                wanted = reached + rng.randrange(3)
                seen, lines = reached, []
                for line in child.stdout:
                    lines.append(line.decode())
                    found = re.match(r"(?:pass|resumed after pass) (\d+)", lines[-1])
                    if found:
                        assert int(found.group(1)) >= seen, lines
                        seen = int(found.group(1))
                    if seen >= wanted and "pass" in lines[-1]:
                        break
                time.sleep(rng.random() * 0.05)
                child.send_signal(signal.SIGKILL)
                rest = child.stdout.read().decode()
                child.wait()
                for found in re.findall(r"pass (\d+) done", rest):
                    seen = int(found)
                killed += child.returncode == -signal.SIGKILL
                assert child.returncode == -signal.SIGKILL, "%s%s%s" % (lines, rest, child.stderr.read().decode())
            if life:
                found = [re.match(r"resumed after pass (\d+)", line) for line in lines]
                at = [int(f.group(1)) for f in found if f]
                assert not reached or (at and at[0] >= reached), "after %d: %s" % (reached, lines)
            reached = seen
        out, _ = swap(folder, "--memory", 4, "--times", 10, "--passes", 14, "--resume")
        assert "every byte was right" in out and killed == 6
        assert os.listdir(folder) == [], "left behind: %s" % os.listdir(folder)


if __name__ == "__main__":
    tests, failures = [(k, v) for k, v in list(globals().items()) if k.startswith("test_")], 0
    for number, (name, function) in enumerate(tests, 1):
        try:
            function()
            print("ok %d - %s" % (number, name), flush=True)
        except Skip as why:
            print("ok %d - %s # SKIP %s" % (number, name, why), flush=True)
        except Exception:
            failures += 1
            print("# " + traceback.format_exc().strip().replace("\n", "\n# "))
            print("not ok %d - %s" % (number, name), flush=True)
    print("1..%d" % len(tests))
    sys.exit(1 if failures else 0)
