#!/usr/bin/env python3
"""The command on storage that misbehaves, for real: stale swap files, two runs on one folder, io_uring denied, little locked memory,
few descriptors, tmpfs, a disk that fills beside the run.  Each ends in the weights of a run without drives, or in one sentence.
Cases NVM-02, NVM-04, NVM-05, NVM-17, NVM-22, NVM-26, NVM-29; the same through the engine: tests/engine/test_real.c."""

import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys

from cli_common import SMALL, STOKER, log, read, run_tests, sanitized, skip
from test_cli_disk import Tmpfs, fill
from test_cli_runs import wait_for_step

SWAP = ["--params", "nvme", "--optimizer-state", "nvme", "--grads", "nvme"]
STEPS = 6
NETFS = os.environ.get("STK_NETFS", os.path.join(os.path.dirname(STOKER) or ".", "tests", "nvme", "netfs"))


def folder(p, name):
    os.makedirs(p.at(name), exist_ok=True)
    return p.at(name)


def weights(p, out):
    return read(p.at(out, "model.safetensors"))


def reference(p, steps=STEPS):
    name = "storage-reference-%d" % steps
    if not os.path.exists(p.at(name)):
        p.train(name, "--steps", steps)
    return weights(p, name)


def arguments(p, out, nvme, *more, steps=STEPS):
    return [STOKER, "train", "--model", p.model, "--data", p.data, "--out", p.at(out), *SMALL, "--steps", str(steps),
            "--nvme", nvme, *SWAP, *more]


def limited(p, out, nvme, before, *more, **options):
    """Runs the command after `before` was called in the child; (exit code, stdout, stderr)."""
    done = subprocess.run(arguments(p, out, nvme, *more, **options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120,
                          preexec_fn=before)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def storage_line(out):
    lines = [x for x in out.splitlines() if "storage:" in x]
    assert len(lines) == 1, out
    return lines[0]


def test_nvm_05_three_runs_one_killed_leave_nothing(p):
    nvme = folder(p, "swap05")
    p.train("first", "--steps", STEPS, "--nvme", nvme, *SWAP, "--predict", "auto")
    assert os.listdir(nvme) == [] and weights(p, "first") == reference(p)
    child = subprocess.Popen(arguments(p, "killed", nvme, "--log", p.at("killed.jsonl"), steps=1000000), stdout=subprocess.DEVNULL)
    wait_for_step(p.at("killed.jsonl"), 2, child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert len(os.listdir(nvme)) == 1, "a killed run leaves its folder"
    out, _ = p.train("third", "--steps", STEPS, "--nvme", nvme, *SWAP)
    assert "removed" in out and str(child.pid) in out, out
    assert os.listdir(nvme) == [] and weights(p, "third") == reference(p)


def test_nvm_04_two_runs_on_one_folder(p):
    nvme = folder(p, "swap04")
    both = [subprocess.Popen(arguments(p, "two%d" % i, nvme, steps=30), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for i in (0, 1)]
    for child in both:
        _, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
    assert weights(p, "two0") == weights(p, "two1") == reference(p, 30)
    assert os.listdir(nvme) == []


def deny_io_uring():
    """io_uring_setup (425 everywhere) gives EPERM, as container runtimes have it."""
    filters = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7fff0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *f) for f in filters))
    prog = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(filters), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, prog, 0, 0) != 0:
        os._exit(99)


def test_nvm_29_io_uring_denied(p):
    nvme = folder(p, "swap29")
    code, out, err = limited(p, "denied", nvme, deny_io_uring)
    if code == 99:
        skip("no seccomp here")
    assert code == 0 and weights(p, "denied") == reference(p), err
    assert "posix threads" in storage_line(out) and (out + err).count("EPERM") == 1, (out, err)
    # who asked for io_uring is told; the benchmark labels what it used
    code, _, err = limited(p, "denied-asked", nvme, deny_io_uring, "--storage", "uring")
    assert code == 1 and len(err.strip().splitlines()) == 1 and "EPERM" in err, err
    done = subprocess.run([STOKER, "bench", "nvme", nvme, "--block", "1MiB", "--depth", "4", "--size", "64MiB", "--time", "1.2", "--no-fio",
                           "--mode", "read"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, preexec_fn=deny_io_uring)
    assert done.returncode == 0 and b"posix" in done.stdout, done
    assert os.listdir(nvme) == []


def test_nvm_26_little_locked_memory(p):
    if os.geteuid() != 0:
        skip("needs to become another user")
    nvme, out_folder = folder(p, "swap26"), folder(p, "out26")
    user = 20000 + os.getpid() % 30000
    for path in (nvme, out_folder):
        os.chown(path, user, user)
    for path in (p.root, p.model, p.data):
        os.chmod(path, 0o755)
    for name in os.listdir(p.model):
        os.chmod(os.path.join(p.model, name), 0o644)

    def before():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        os.setgid(user)
        os.setuid(user)

    try:
        code, out, err = limited(p, "out26/run", nvme, before)
    except (subprocess.SubprocessError, PermissionError):
        skip("this user cannot reach the program")
    assert code == 0 and weights(p, "out26/run") == reference(p), err
    if "io_uring" in storage_line(out):
        assert storage_line(out).count("RLIMIT_MEMLOCK is 64 KiB") == 1 and "ulimit -l" in out, out


def test_few_descriptors_and_small_files_are_sentences(p):
    if "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ:
        skip("a sanitizer opens files of its own")
    nvme = folder(p, "swapfd")
    refused = right = 0
    for limit in [8, 10, 12, 14, 16, 18, 20, 24, 28, 36, 64]:
        code, _, err = limited(p, "fd%d" % limit, nvme, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
        if code == 0:
            right += 1
            assert weights(p, "fd%d" % limit) == reference(p)
        else:
            refused += 1
            assert code == 1 and len(err.strip().splitlines()) == 1 and "open files" in err, (limit, err)
        assert os.listdir(nvme) == []
        if right == 2:
            break
    assert refused and right

    def soft():
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    code, out, err = limited(p, "fdsoft", nvme, soft)
    assert code == 0 and weights(p, "fdsoft") == reference(p), err  # it is the program that raises it
    code, _, err = limited(p, "fsize", nvme, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10)))
    assert code == 1 and len(err.strip().splitlines()) == 1 and "File too large" in err and "ulimit -f" in err, err
    assert os.listdir(nvme) == []


SHORT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
static _Atomic unsigned n;
/* of transfers to the store's files every fifth moves one page less, every seventh nothing */
#define TRANSFER(name, type)                                                                  \\
    ssize_t name(int fd, type p, size_t bytes, off_t at)                                      \\
    {                                                                                         \\
        ssize_t (*real)(int, type, size_t, off_t) =                                           \\
            (ssize_t (*)(int, type, size_t, off_t))dlsym(RTLD_NEXT, #name);                   \\
        unsigned k = bytes > 8192 && (fcntl(fd, F_GETFL) & O_DIRECT) ? ++n : 1;               \\
        if (k % 7 == 0) { errno = EAGAIN; return -1; }                                        \\
        if (k % 5 == 0) bytes -= 4096;                                                        \\
        return real(fd, p, bytes, at);                                                        \\
    }
TRANSFER(pread, void *) TRANSFER(pwrite, const void *) TRANSFER(pread64, void *) TRANSFER(pwrite64, const void *)
"""


def test_nvm_17_short_transfers_are_continued_and_counted(p):
    """pread and pwrite that move less than asked for, or answer EAGAIN: the same weights, and the report says how many."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if not cc or sanitized():
        skip("no compiler for the library that cuts transfers short, or a sanitizer that must be first")
    with open(p.at("short.c"), "w") as source:
        source.write(SHORT)
    subprocess.run([cc, "-shared", "-fPIC", "-o", p.at("short.so"), p.at("short.c"), "-ldl"], check=True)
    nvme = folder(p, "swap17")
    env = dict(os.environ, LD_PRELOAD=p.at("short.so"))
    done = subprocess.run(arguments(p, "short", nvme, "--storage", "posix", "--log", p.at("short.jsonl")), env=env, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out = done.stdout.decode()
    assert done.returncode == 0, (done.stderr.decode(), out[-1000:])
    assert weights(p, "short") == reference(p)
    last = log(p.at("short.jsonl"))[-1]
    if not last["nvme_short"]:
        skip("the folder's file system is not opened with O_DIRECT")
    assert last["nvme_retries"] >= last["nvme_short"] > 0, last
    assert "cut short by the kernel" in out, out[-1000:]


def test_nvm_22_tmpfs_is_one_line_and_the_same_weights(p):
    with Tmpfs(p, "64m", "mem22") as disk:
        out, _ = p.train("out22", "--steps", STEPS, "--nvme", disk, *SWAP)
        assert out.count("on tmpfs") == 1, out
        assert weights(p, "out22") == reference(p) and os.listdir(disk) == []


class Netfs(Tmpfs):
    """A mount of tests/nvme/netfs.h, seen through its server's own namespace."""

    def __init__(self, p, name):
        self.folder = folder(p, name)
        try:
            self.child = subprocess.Popen(["unshare", "-rm", NETFS, self.folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError:
            skip("no unshare")
        if self.child.stdout.readline() != b"ready\n":
            self.child.wait()
            skip("FUSE in a user namespace is not allowed here")
        self.path = "/proc/%d/root%s" % (self.child.pid, os.path.realpath(self.folder))


def test_nvm_22_a_network_file_system_is_one_line_and_the_same_weights(p):
    """O_DIRECT is refused there, and what is removed while it is open stays until it is closed."""
    with Netfs(p, "net22") as disk:
        out, err = p.train("out22n", "--steps", STEPS, "--nvme", disk, *SWAP)
        assert (out + err).count("no O_DIRECT on a swap path") == 1 and "buffered" in storage_line(out), (out, err)
        assert weights(p, "out22n") == reference(p) and os.listdir(disk) == [], os.listdir(disk)
        done = subprocess.run([STOKER, "bench", "nvme", disk, "--block", "1MiB", "--depth", "4", "--size", "64MiB", "--time", "1.2", "--no-fio",
                               "--mode", "read", "--json", p.at("net22.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        assert done.returncode == 0, done
        results = json.loads(read(p.at("net22.json")))
        assert results and not any(r["valid"] or r["direct"] for r in results), results
        assert all("O_DIRECT" in r["why_invalid"] and "page cache" in r["why_invalid"] for r in results), results
        assert os.listdir(disk) == []


def test_nvm_02_a_disk_that_fills_beside_the_run(p):
    """The run's files are preallocated: it goes on, and its weights are right."""
    with Tmpfs(p, "8m", "full02") as disk:
        child = subprocess.Popen(arguments(p, "filled", disk, "--log", p.at("filled.jsonl"), steps=400), stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE)
        wait_for_step(p.at("filled.jsonl"), 3, child)
        fill(disk)
        _, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        assert os.listdir(disk) == ["filler"]
    assert len(log(p.at("filled.jsonl"))) == 400 and weights(p, "filled") == reference(p, 400)


if __name__ == "__main__":
    run_tests(sys.modules[__name__])
