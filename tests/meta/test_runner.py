#!/usr/bin/env python3
"""Tests of scripts/run_tests.py: whatever did not finish counts as failed. Prints TAP."""

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUNNER = os.path.join(ROOT, "scripts", "run_tests.py")
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import run_tests  # noqa: E402


def kinds(output, code=0, timed_out=False):
    return [kind for _, kind, _ in run_tests.judge("p", output, code, 30, timed_out)]


def test_lines_are_counted():
    tests, plan = run_tests.parse_tap("# why\nnot ok 1 - a\nok 2 - b # SKIP no disk\nok 3 - c\n1..3\n")
    assert plan == 3
    assert tests == [("a", "failed", ["# why"]), ("b", "skipped", ["no disk"]), ("c", "passed", [])]
    assert run_tests.parse_tap("TAP version 13\n1..1\nok\n")[0][0][1] == "passed"
    assert run_tests.parse_tap("okay, nothing\nnot okay\n")[0] == []


def test_what_did_not_finish_failed():
    assert kinds("ok 1 - a\n1..1\n") == ["passed"]
    assert kinds("ok 1 - a\n1..1\n", code=66) == ["passed", "failed"]       # a sanitizer spoke at the end
    assert kinds("ok 1 - a\n", code=-11) == ["passed", "failed"]            # a crash
    assert kinds("ok 1 - a\n") == ["passed", "failed"]                      # no plan
    assert kinds("ok 1 - a\n1..2\n") == ["passed", "failed"]                # half of it
    assert kinds("") == ["failed"]                                          # nothing
    assert kinds("ok 1 - a\n1..1\n", code=-9, timed_out=True) == ["passed", "failed"]
    assert kinds("not ok 1 - a\n1..1\n", code=1) == ["failed"]              # counted once
    assert kinds("1..0 # SKIP no io_uring\n") == ["skipped"]
    assert kinds("", code=77) == ["skipped"]
    assert kinds("Bail out! no memory\n", code=1)[0] == "failed"
    assert run_tests.judge("p", "text", 0, 30, False, "exitcode") == [("p", "passed", [])]
    assert run_tests.judge("p", "text", 1, 30, False, "exitcode")[0][1] == "failed"


def summary(results):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results")
        run_tests.append(path, results)
        done = subprocess.run([sys.executable, RUNNER, "summary", "--results", path], stdout=subprocess.PIPE, universal_newlines=True)
    return done.returncode, done.stdout.splitlines()


def test_summary_and_exit_code():
    def one(kind):
        return {"label": "gcc", "program": "p", "took_s": 0, "tests": [{"name": "t", "kind": kind, "lines": ["# above"]}]}
    assert summary([one("passed")]) == (0, ["1 passed, 0 failed, 0 skipped"])
    code, lines = summary([one("passed"), one("failed")])
    assert code == 1 and lines == ["# above", "FAILED: gcc p: t", "1 passed, 1 failed, 0 skipped"]
    assert summary([])[0] == 1, "no test at all is no success"


def test_reasons_of_skips():
    """One line a reason, with how often, before the last line; whatever the way in which a program says it."""
    def program(name, output, code=0, protocol="tap"):
        tests = run_tests.judge(name, output, code, 30, False, protocol)
        return {"label": "gcc", "program": name, "took_s": 0, "tests": [{"name": n, "kind": k, "lines": x} for n, k, x in tests]}
    results = [program("a", "# above\nok 1 - x # SKIP no fio\nok 2 - y # skip: no fio\nok 3 - z # SKIP\n1..3\n"),
               program("b", "1..0 # SKIP no network\n"), program("c", "# looking\nneeds root\n", 77),
               program("d", "needs root\n", 77, "exitcode"), program("e", "1..0\n"), program("f", "ok 1 - a # TO" + "DO later\n1..1\n")]
    assert summary(results) == (1, ["skipped   2: needs root", "skipped   2: no fio", "skipped   1: later", "skipped   1: no network",
                                    "skipped   1: no reason given (a)", "skipped   1: no reason given (e)",
                                    "0 passed, 0 failed, 8 skipped"]), summary(results)


def test_zr3_04_a_room_that_did_not_run_fails():
    """How much ran is said for each room; one of which everything was skipped is no success, unless a part was asked for."""
    def one(room, kinds, whole=True, label="gcc"):
        return {"label": label, "program": "p", "room": room, "whole": whole, "took_s": 0,
                "tests": [{"name": "t", "kind": kind, "lines": ["no disk"]} for kind in kinds]}
    some = [one("nvme", ["passed", "skipped"]), one("base", ["passed"])]
    said = ["skipped   1: no disk", "ran, by room: base 1, nvme 1 (1 skipped)", "2 passed, 0 failed, 1 skipped"]
    assert summary(some) == (0, said), summary(some)
    code, lines = summary(some + [one("offload", ["skipped"] * 3), one("offload", ["skipped"])])
    assert code == 1 and lines[-2:] == ["FAILED: gcc: none of 4 tests in the room offload ran", "2 passed, 1 failed, 5 skipped"], lines
    assert summary(some + [one("nvme", ["skipped"], label="asan")])[0] == 1, "each configuration by itself"
    assert summary(some + [one("offload", ["skipped"], whole=False)])[0] == 0


def test_programs_are_run():
    """A crash, a hang and a good program, through the whole of `run`."""
    def test(name, script, timeout):
        return {"name": name, "cmd": ["sh", "-c", script], "suite": ["p:room"], "timeout": timeout, "env": {"WORD": "given"}}
    programs = [test("good", "echo ok 1 - $WORD; echo 1..1", 30), test("crash", "echo ok 1 - a; kill -SEGV $$", 30),
                test("hang", "echo ok 1 - a; exec sleep 100", 1), test("soak", "exit 1", 30)]
    programs[3]["suite"] = ["p:soak"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "results")
        saved, run_tests.listed, saved_argv = run_tests.listed, lambda build: programs, sys.argv
        sys.argv = ["run_tests.py", "run", "--label", "x", "--build", folder, "--results", path]
        try:
            with redirect_stdout(io.StringIO()):
                assert run_tests.main() == 1
        finally:
            run_tests.listed, sys.argv = saved, saved_argv
        with open(path) as source:
            found = {r["program"]: [(t["name"], t["kind"]) for t in r["tests"]] for r in map(json.loads, source)}
    assert found == {"good": [("given", "passed")], "crash": [("a", "passed"), ("(the program)", "failed")],
                     "hang": [("a", "passed"), ("(the program)", "failed")]}, found


def main():
    tests = [(name, fn) for name, fn in sorted(globals().items()) if name.startswith("test_")]
    failed = 0
    for number, (name, fn) in enumerate(tests, 1):
        try:
            fn()
            print("ok %d - %s" % (number, name))
        except Exception as error:  # a test that breaks is a failed test
            failed += 1
            print("# %s: %r\nnot ok %d - %s" % (name, error, number, name))
    print("1..%d" % len(tests))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
