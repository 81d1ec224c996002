#!/usr/bin/env python3
"""`stoker bench nvme` as a user has it: small files, short times.  Prints TAP; standard library only."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree

STOKER = os.environ.get("STOKER_BINARY", "build/stoker")
LIMIT_S = float(os.environ.get("STOKER_TEST_LIMIT_S", "90"))
PLACE = ["--block", "1MiB", "--depth", "4", "--size", "64MiB"]
POINT = PLACE + ["--time", "1.2"]
FIXED = ["mode", "block_bytes", "depth", "bytes_per_s", "fio_bytes_per_s", "share_of_fio", "p50_ns", "p99_ns", "valid"]


class Skip(Exception):
    pass


def bench(*args, code=0, env=None):
    done = subprocess.run([STOKER, "bench", "nvme"] + [str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=dict(os.environ, **(env or {})), timeout=LIMIT_S)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, "exit %d, not %d: %s\n%s" % (done.returncode, code, err, out[-500:])
    return out, err


def refused(code, words, *args):
    _, err = bench(*args, code=code)
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("stoker: "), "not one sentence: %r" % err
    for word in words:
        assert word in err, "%r is not in %r" % (word, err)


def sanitized():
    with open(STOKER, "rb") as x:
        data = x.read()
    return b"__asan_init" in data or b"__tsan_init" in data


def load(path):
    with open(path) as f:
        return json.load(f)


def left(folder):
    return [os.path.join(d, n) for d, _, names in os.walk(folder) for n in names if not n.endswith((".json", ".html"))]


def check_results(results):
    assert isinstance(results, list) and results
    for r in results:
        for key in FIXED:
            assert key in r, "%s is missing in %s" % (key, r)
        assert r["mode"] in ("read", "write", "mixed", "optimizer")
        assert r["bytes_per_s"] > 0 and r["bytes"] > 0 and r["ns"] > 0
        assert 0 < r["p50_ns"] <= r["p95_ns"] <= r["p99_ns"] <= r["p999_ns"] <= r["max_ns"] * 1.04, r
        assert (r["fio_bytes_per_s"] is None) == (r["share_of_fio"] is None)
        if r["mode"] == "read":
            assert r["write_bytes_per_s"] is None
        if r["mode"] == "write":
            assert r["read_bytes_per_s"] is None


def test_one_point(place):
    """Every mode, the fixed names, nothing of fio where it is not wanted."""
    f = os.path.join(place, "a.json")
    out, _ = bench(place, *POINT, "--no-fio", "--json", f)
    results = load(f)
    check_results(results)
    assert [r["mode"] for r in results] == ["read", "write", "mixed", "optimizer"]
    for r in results:
        assert r["block_bytes"] == 1 << 20 and r["depth"] == 4
        assert r["share_of_fio"] is None and r["fio_bytes_per_s"] is None
    both = results[2]
    assert both["read_bytes_per_s"] > 0 and both["write_bytes_per_s"] > 0
    assert "at most" in out and "written to each path" in out, "wear is not announced"
    assert out.index("written to each path") < out.index("pattern"), "announced too late"
    assert "limit " in out and "8B" in out
    assert not left(place)


def test_ben_04_write_time_includes_the_flush(place):
    """Bytes over time is the rate; the time of writes ends with their flush (nvme/measure.h)."""
    f = os.path.join(place, "a.json")
    bench(place, *POINT, "--no-fio", "--mode", "write", "--json", f)
    r = load(f)[0]
    assert abs(r["bytes"] / (r["ns"] / 1e9) / r["bytes_per_s"] - 1) < 0.02, r


def test_ben_01_ben_07_default_sweep(place):
    """All phases, in the time that was given (BEN-01: a sweep that ends), and both pages."""
    j, h = os.path.join(place, "a.json"), os.path.join(place, "a.html")
    out, _ = bench(place, "--size", "128MiB", "--time", "4", "--no-fio", "--json", j, "--html", h)
    results = load(j)
    check_results(results)
    steps = {r["step"] for r in results}
    assert {"point", "sweep"} <= steps, steps
    there = {(r["mode"], r["block_bytes"]) for r in results if r["step"] == "point"}
    assert ("read", 1 << 20) in there
    if "the time was up" not in out:
        assert there >= {(m, b << 20) for m in ("read", "write", "mixed") for b in (1, 4)}, there
    assert results[0]["step"] == "point", "points come first"
    again = [r for r in results if r["step"] == "again"]
    assert len(again) == 1 and (again[0]["mode"], again[0]["block_bytes"]) == ("read", 1 << 20)
    assert "by the samples" in out or "from one sample" in out
    assert "sweep of reads" in out and "limit " in out
    check_page(h, 2)
    assert not left(place)


def check_page(path, plots):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    root = xml.etree.ElementTree.fromstring(text)  # well-formed
    svgs = [e for e in root.iter() if e.tag.endswith("svg")]
    assert len(svgs) >= plots, len(svgs)
    for e in root.iter():
        name = e.tag.split("}")[-1]
        assert name not in ("script", "link", "img", "iframe", "object"), name
        for key in e.attrib:
            assert key.split("}")[-1] not in ("src", "href"), "%s of %s: not self-contained" % (key, name)
    assert "url(" not in text and "@import" not in text and "nan" not in text.lower().replace("nanosecond", "")
    assert "@media print" in text


def test_ben_05_verify(place):
    f = os.path.join(place, "a.json")
    bench(place, *POINT, "--verify", "--json", f)
    results = load(f)
    check_results(results)
    for r in results:
        assert r["verified"] and r["verify_failures"] == 0
        if r["mode"] != "read":
            assert r["share_of_fio"] is None, "fio wrote into what is verified"


def test_fio_beside_it(place):
    if not shutil.which("fio"):
        raise Skip("fio is not installed")
    f = os.path.join(place, "a.json")
    bench(place, *PLACE, "--mode", "read,write", "--pairs", "3", "--time", "4", "--json", f)
    results = load(f)
    check_results(results)
    for r in results:
        assert r["fio_bytes_per_s"] > 0 and 0 < r["share_of_fio"] < 20, r
        assert len(r["pairs_ours_fio"]) == 3
        ratios = sorted(a / b for a, b in r["pairs_ours_fio"])
        assert abs(ratios[1] - r["share_of_fio"]) < 1e-6
        assert r["share_of_fio_low"] <= r["share_of_fio"] <= r["share_of_fio_high"]
    assert not left(place)


def test_no_fio_installed(place):
    f = os.path.join(place, "a.json")
    out, _ = bench(place, *POINT, "--mode", "read", "--json", f, env={"PATH": place})
    assert "fio is not installed" in out
    assert load(f)[0]["share_of_fio"] is None


def test_fio_that_fails(place):
    fake = os.path.join(place, "bin")
    os.mkdir(fake)
    with open(os.path.join(fake, "fio"), "w") as f:
        f.write('#!/bin/sh\n[ "$1" = --version ] && { echo fio-0.0; exit 0; }\necho "no such engine" >&2\nexit 1\n')
    os.chmod(os.path.join(fake, "fio"), 0o755)
    f = os.path.join(place, "a.json")
    out, _ = bench(place, *POINT, "--mode", "read,write", "--json", f, env={"PATH": fake + ":" + os.environ["PATH"]})
    assert out.count("no such engine") == 1, out
    assert all(r["share_of_fio"] is None for r in load(f))


def test_ben_01_tmpfs_is_invalid(place):
    shm = "/dev/shm"
    if not os.path.isdir(shm) or not os.access(shm, os.W_OK) or shutil.disk_usage(shm).free < 300 << 20:
        raise Skip("no tmpfs to write to")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        f = os.path.join(place, "a.json")
        out, _ = bench(folder, *POINT, "--no-fio", "--json", f)
        for r in load(f):
            assert r["valid"] is False and "tmpfs" in r["why_invalid"], r
            assert r["limit"] == "page cache"
        assert "INVALID" in out
        assert not os.listdir(folder)


def test_several_paths(place):
    a, b = os.path.join(place, "a"), os.path.join(place, "b")
    os.mkdir(a)
    os.mkdir(b)
    f, h = os.path.join(place, "a.json"), os.path.join(place, "a.html")
    out, _ = bench(a, b, *PLACE, "--mode", "read,write", "--time", "3", "--no-fio", "--json", f, "--html", h)
    results = load(f)
    check_results(results)
    assert [len(r["paths"]) for r in results] == [2, 2, 1, 1, 1, 1], "together first, then each alone"
    for r in results[:2]:
        parts = [p["bytes_per_s"] for p in r["paths"]]
        assert abs(sum(parts) / r["bytes_per_s"] - 1) < 0.02, r
    assert "share a drive" in out and "of the sum" in out
    check_page(h, 1)
    assert not left(place)


def test_ben_08_ben_10_sustained(place):
    """The series is kept; the first samples (burst, warm-up) and the rate that lasts are apart."""
    f = os.path.join(place, "a.json")
    out, _ = bench(place, "--block", "1MiB", "--depth", "8", "--size", "64MiB", "--mode", "write", "--no-fio", "--sustained",
                   "--time", "3", "--json", f)
    r = [x for x in load(f) if x["step"] == "sustained"][0]
    assert len(r["series_s_bytes_per_s"]) >= 2  # a slow machine has few
    assert r["burst_bytes_per_s"] > 0 and r["sustained_bytes_per_s"] > 0 and isinstance(r["steady"], bool)
    assert "burst " in out or "at first " in out
    assert r["threads"] >= 2 and r["kernel_workers"] >= 0


def test_ben_08_reads_go_on_without_writes(place):
    f = os.path.join(place, "a.json")
    out, _ = bench(place, *PLACE, "--mode", "read", "--no-fio", "--sustained", "--time", "6", "--json", f)
    results = load(f)
    check_results(results)
    r = [x for x in results if x["step"] == "sustained"][0]
    assert r["mode"] == "read" and r["write_bytes_per_s"] is None and len(r["series_s_bytes_per_s"]) >= 2
    assert r["paths"][0]["written_bytes"] <= 80 << 20, r
    limit = [line for line in out.splitlines() if line.startswith("limit")][0]
    assert "writ" not in limit and "0.00" not in limit, limit
    if r["late_over_early"] is not None:
        assert "last tenth ran at" in out and "workers of the kernel" in out


def test_ben_08_ten_minutes(place):
    """`./dev soak` only: the last minute against the second; what is said agrees with what was measured."""
    if not os.environ.get("STK_SOAK"):
        raise Skip("ten minutes: in ./dev soak")
    f = os.path.join(place, "a.json")
    done = subprocess.run([STOKER, "bench", "nvme", place, *PLACE, "--mode", "read", "--no-fio", "--sustained", "--time", "700", "--json", f],
                          stdout=subprocess.PIPE, timeout=900)
    assert done.returncode == 0
    out = done.stdout.decode()
    r = [x for x in load(f) if x["step"] == "sustained"][0]
    seconds = r["series_s_bytes_per_s"][-1][0]
    print("# %.0f s, the last tenth at %.2f of the second, %d workers of the kernel" % (seconds, r["late_over_early"], r["kernel_workers"]))
    assert seconds >= 600 and r["kernel_workers"] <= 64
    assert ("decays" in out) == (r["late_over_early"] < 0.9)


def test_write_max(place):
    f = os.path.join(place, "a.json")
    out, _ = bench(place, *POINT, "--no-fio", "--write-max", "80MiB", "--json", f)
    written = load(f)[0]["paths"][0]["written_bytes"]
    assert written <= 100 << 20, written
    assert "--write-max is used up" in out


def test_posix(place):
    f = os.path.join(place, "a.json")
    bench(place, *POINT, "--no-fio", "--mode", "read", "--kind", "posix", "--json", f)
    assert load(f)[0]["backend"].startswith("posix")


def test_refusals(place):
    refused(2, ["no path"])
    refused(1, ["nowhere"], os.path.join(place, "nowhere"))
    plain = os.path.join(place, "file.json")
    open(plain, "w").close()
    refused(1, ["is no folder"], plain)
    refused(2, ["--blok", "--block"], place, "--blok", "1MiB")
    refused(2, ["4096"], place, "--block", "5000")
    refused(2, ["twice their product"], place, "--block", "16MiB", "--depth", "32", "--size", "64MiB")
    refused(2, ["read, write, mixed and optimizer"], place, "--mode", "reed")
    refused(2, ["same folder"], place, place + "/.")
    refused(1, ["free", "--size"], place, "--size", "900TiB")
    refused(1, ["--json", "cannot be written"], place, "--json", os.path.join(place, "no", "a.json"))
    refused(1, ["--html", "folder"], place, "--html", place)
    refused(2, ["--json and --html"], place, "--json", os.path.join(place, "same"), "--html", os.path.join(place, "same"))
    assert os.listdir(place) == ["file.json"]


def test_pairs_refuse_in_one_sentence(place):
    """bench/nvme_pairs.py: a folder or a program that is not there."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "nvme_pairs.py")

    def refuse(words, *args):
        done = subprocess.run([sys.executable, script, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
        lines = done.stderr.decode().strip().splitlines()
        assert done.returncode != 0 and len(lines) == 1 and all(w in lines[0] for w in words), (done.returncode, lines)

    plain = os.path.join(place, "plain")
    open(plain, "w").close()
    refuse(["--dir", "is needed"])
    refuse(["--dir", os.path.join(place, "gone")], "--dir", os.path.join(place, "gone"), "--what", "fio", "--stoker", STOKER)
    refuse(["--dir", plain], "--dir", plain, "--what", "fio", "--stoker", STOKER)
    refuse(["--store-pairs", "nothing-here"], "--dir", place, "--what", "store", "--store-pairs", "nothing-here")
    refuse(["--stoker", plain], "--dir", place, "--what", "fio", "--stoker", plain)
    refuse(["--what", "fioo"], "--dir", place, "--what", "fioo")


def test_pairs_of_the_store_are_starts_and_can_miss(place):
    """bench/nvme_pairs.py: each pair is a new process, and a store that is slower than its floor is not met; one odd start decides nothing."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench", "nvme_pairs.py")
    stand_in = os.path.join(place, "stand_in")

    def run(ratios):
        count = os.path.join(place, "count")
        with open(stand_in, "w") as f:
            f.write("""#!/bin/sh
n=$(cat '%s' 2>/dev/null || echo 0); echo $((n + 1)) > '%s'
set -- %s
shift $((n %% $#)); echo '{"plain": 1e9, "store": '$1', "store_no_checksums": 1e9}'
""" % (count, count, " ".join(str(r * 1e9) for r in ratios)))
        os.chmod(stand_in, 0o755)
        done = subprocess.run([sys.executable, script, "--dir", place, "--what", "store", "--modes", "read", "--blocks", "1MiB", "--pairs-max",
                               str(len(ratios)), "--store-pairs", stand_in], stdout=subprocess.PIPE, timeout=LIMIT_S)
        lines = [json.loads(x) for x in done.stdout.splitlines()]
        starts = int(open(count).read())
        os.remove(count)
        pairs = [x for x in lines if x["what"] == "store" and not x.get("summary")]
        assert starts == len(pairs), (starts, len(pairs))
        return done.returncode, next(x for x in lines if x.get("summary") and x["what"] == "store")

    code, slow = run([0.90, 0.91, 0.89, 0.90, 0.92, 0.91, 0.90])
    assert code == 1 and not slow["met"] and slow["median_ratio"] < 0.95, slow
    code, fine = run([0.99, 1.00, 0.60, 0.98, 1.01, 0.99, 1.00, 0.98, 1.00])
    assert code == 0 and fine["met"] and fine["ratio_min"] == 0.6 and 0.97 < fine["median_ratio"], fine


def test_standard_output_that_is_full(place):
    with open("/dev/full", "w") as full:
        done = subprocess.run([STOKER, "bench", "nvme", place, *POINT, "--no-fio", "--mode", "read"], stdout=full,
                              stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert done.returncode == 1 and b"standard output" in done.stderr, done


def test_no_such_bench(place):
    done = subprocess.run([STOKER, "bench", "nvm"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert done.returncode == 2 and b"did you mean nvme" in done.stderr
    done = subprocess.run([STOKER, "bench"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert done.returncode == 2 and b"nvme" in done.stderr


def test_help(place):
    out, _ = bench("--help")
    for word in ("--json", "--html", "--sustained", "seconds per step", "invalid", "Exit codes"):
        assert word in out, word


def test_unwritable(place):
    locked = os.path.join(place, "locked")
    os.mkdir(locked)
    os.chmod(locked, 0o555)
    if os.access(locked, os.W_OK):
        raise Skip("root may write everywhere")
    refused(1, ["cannot be made there"], locked)


def test_file_limit(place):
    """`ulimit -f`: a file that may not grow ends in one sentence, nothing is left."""
    script = 'ulimit -f 8192; exec "$0" bench nvme "$@"'
    done = subprocess.run(["bash", "-c", script, STOKER, place] + POINT + ["--no-fio"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=LIMIT_S)
    err = done.stderr.decode().strip().splitlines()
    assert done.returncode == 1 and len(err) == 1 and place in err[0], (done.returncode, err)
    assert not left(place)


def interrupt(place, extra, after, number=signal.SIGINT):
    f = os.path.join(place, "a.json")
    p = subprocess.Popen([STOKER, "bench", "nvme", place, "--size", "64MiB", "--json", f] + extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    text = b""
    while after not in text:
        line = p.stdout.readline()
        assert line, "ended too early: %r" % text
        text += line
    p.send_signal(number)
    out, _ = p.communicate(timeout=LIMIT_S)
    return p.returncode, (text + out).decode(), f


def test_sigint_prints_what_it_has(place):
    code, out, f = interrupt(place, ["--no-fio", "--block", "1MiB", "--depth", "4", "--time", "8"], b"  read ")
    assert code == 130, code
    assert "stopped early" in out, out
    assert [r["mode"] for r in load(f)][:1] == ["read"]
    assert not left(place)


def test_sigint_at_once(place):
    code, _, f = interrupt(place, ["--no-fio", "--time", "6000"], b"beside it")
    assert code == 130, code
    assert isinstance(load(f), list)
    assert not left(place)


def test_sigint_while_fio_runs(place):
    if not shutil.which("fio"):
        raise Skip("fio is not installed")
    code, _, _ = interrupt(place, ["--block", "1MiB", "--depth", "4", "--mode", "read", "--pairs", "8", "--time", "6000"], b"pattern")
    assert code == 130, code
    assert not left(place)


def test_kill_leaves_nothing(place):
    code, _, _ = interrupt(place, ["--no-fio", "--time", "6000"], b"pattern", signal.SIGKILL)
    assert code == -signal.SIGKILL, code
    assert not left(place)


def test_ben_04_a_flush_that_fails(place):
    """EIO from the flush behind the writes: exit 1, one sentence, and the result says why it is none."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if not cc or sanitized():
        raise Skip("no compiler for the library that makes fsync fail, or a sanitizer that must be first")
    f, source, library = (os.path.join(place, x) for x in ("a.json", "fail.c", "fail.so"))
    with open(source, "w") as x:  # the first is that of the file's first write
        x.write("#include <errno.h>\nstatic int n;\nint fsync(int fd) { (void)fd; if (n++ == 0) return 0; errno = EIO; return -1; }\n")
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, source], check=True)
    done = subprocess.run([STOKER, "bench", "nvme", place, *POINT, "--no-fio", "--kind", "posix", "--mode", "write", "--json", f],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S, env=dict(os.environ, LD_PRELOAD=library))
    err = done.stderr.decode()
    assert done.returncode == 1 and "flush behind the writes failed: Input/output error" in err, (done.returncode, err)
    results = load(f)
    assert len(results) == 1 and results[0]["valid"] is False and "flush" in results[0]["why_invalid"], results


def test_ben_01_a_loop_device_through_the_page_cache(place):
    """Its reads come from memory: no result of it is valid; with direct I/O they may be."""
    if os.geteuid() != 0 or not shutil.which("losetup") or not shutil.which("mkfs.ext4"):
        raise Skip("wants root and loop devices")
    image, mount, f = (os.path.join(place, x) for x in ("image", "mount", "a.json"))
    with open(image, "wb") as x:
        os.posix_fallocate(x.fileno(), 0, 160 << 20)
    os.mkdir(mount)
    device = None
    try:
        made = subprocess.run(["losetup", "--find", "--show", image], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if made.returncode:
            raise Skip("no loop device: " + made.stderr.decode().strip())
        device = made.stdout.decode().strip()
        for command in (["mkfs.ext4", "-q", device], ["mount", device, mount]):
            if subprocess.run(command, stderr=subprocess.PIPE).returncode:
                raise Skip(" ".join(command) + " is refused")
        with open("/sys/block/%s/loop/dio" % os.path.basename(device)) as x:
            assert x.read().strip() == "0"
        out, _ = bench(mount, *POINT, "--no-fio", "--json", f)
        for r in load(f):
            assert r["valid"] is False and "page cache" in r["why_invalid"] and device in r["why_invalid"], r
        assert "memory answered" in out
    finally:
        for _ in range(100):  # the kernel lets go of an io_uring's files a moment after its process
            if not os.path.ismount(mount) or subprocess.run(["umount", mount], stderr=subprocess.PIPE).returncode == 0:
                break
            time.sleep(0.1)
        if device:
            subprocess.run(["losetup", "--detach", device])


def main():
    tests = [(k[5:], v) for k, v in sorted(globals().items()) if k.startswith("test_")]
    wanted, failed, n = sys.argv[1:], 0, 0
    for name, function in tests:
        if wanted and not any(w in name for w in wanted):
            continue
        n += 1
        try:
            with tempfile.TemporaryDirectory(prefix="stoker-bench-", dir=os.environ.get("STOKER_TEST_DIR")) as place:
                function(place)
            print("ok %d - %s" % (n, name), flush=True)
        except Skip as why:
            print("ok %d - %s # SKIP %s" % (n, name, why), flush=True)
        except (AssertionError, OSError, subprocess.TimeoutExpired, KeyError, ValueError, xml.etree.ElementTree.ParseError):
            failed += 1
            for line in traceback.format_exc().splitlines()[-12:]:
                print("# " + line)
            print("not ok %d - %s" % (n, name), flush=True)
    print("1..%d" % n)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
