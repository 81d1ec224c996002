#!/usr/bin/env python3
"""Runs the tests of meson build folders and counts single tests, not programs.

    run_tests.py run --label gcc --build build --results FILE [--match RE] [--exclude RE] ...
    run_tests.py programs --build build [--match RE] [--exclude RE]    what must be built for such a run, for ninja
    run_tests.py note --label clang --results FILE --failed TEXT [--log FILE]
    run_tests.py summary --results FILE

Every test program prints TAP (tests/test.h).  A program counts as one failed test more when it crashed, ran out of
time, printed no test, ended with a code that its lines do not explain, or printed another number of tests than its
plan says: nothing that did not finish can pass.  `run` appends what it counted to the results file, one JSON
object a line; `summary` prints the failures, a line for each reason why something was skipped, one with how much of
each room ran, and ends with one line, `N passed, N failed, N skipped`.  A room of which no test ran, though nothing
was left out by --match, is a failure (ZR3-04).

Only the standard library: this runs on a fresh machine.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

TAP_LINE = re.compile(r"^(not ok|ok)\b(?:\s+\d+)?(?:\s*-)?\s*([^#]*)(?:#\s*(\w+)(.*))?$")
TAP_PLAN = re.compile(r"^1\.\.(\d+)(?:\s*#\s*skip\b.*)?\s*$", re.IGNORECASE)
TAP_SKIPPED_PLAN = re.compile(r"^1\.\.0\s*#\s*skip(ped)?\b[\s:]*", re.IGNORECASE)
LINES_SHOWN = 40  # of a failing test's output
LIMIT_MAX_S = 1500


def parse_tap(text):
    """(tests, plan): tests are (name, 'passed' | 'failed' | 'skipped', lines above it, or the reason of a skip); plan is None
    when there is none."""
    tests, above, plan = [], [], None
    for line in text.splitlines():
        found = TAP_LINE.match(line)
        planned = TAP_PLAN.match(line)
        if found:
            word = (found.group(3) or "").lower()
            kind = "passed" if found.group(1) == "ok" else "failed"
            if word.startswith("skip"):
                kind = "skipped"
            elif word == "todo":
                kind = "skipped"
            if kind == "skipped":
                above = [found.group(4).strip(" :")]
            tests.append((found.group(2).strip() or "test %d" % (len(tests) + 1), kind, above))
            above = []
        elif planned:
            plan = int(planned.group(1))
        elif line.startswith("Bail out!"):
            tests.append((line.strip(), "failed", above + [line]))
            above = []
        else:
            above.append(line)
    return tests, plan


def last_line(output):
    return [line.lstrip("# ").strip() for line in output.splitlines() if line.strip()][-1:]


def judge(name, output, code, limit_s, timed_out, protocol="tap"):
    """What one program's output and exit code come to: a list of (test, kind, lines)."""
    if protocol == "exitcode" and code in (0, 77) and not timed_out:
        return [(name, "passed", [])] if code == 0 else [(name, "skipped", last_line(output))]
    tests, plan = parse_tap(output)
    failed = sum(kind == "failed" for _, kind, _ in tests)
    why = None
    if timed_out:
        why = "did not end within %d s" % limit_s
    elif code < 0:
        why = "was killed by signal %s" % signal.Signals(-code).name
    elif code == 77 and not tests:
        return [(name, "skipped", last_line(output))]
    elif not tests and plan == 0 and code == 0:
        return [(name, "skipped", [TAP_SKIPPED_PLAN.sub("", line) for line in output.splitlines() if TAP_SKIPPED_PLAN.match(line)])]
    elif not tests:
        why = "printed no test (exit code %d)" % code
    elif plan is None:
        why = "printed no plan: it ended early (exit code %d)" % code
    elif plan != len(tests):
        why = "planned %d tests and printed %d" % (plan, len(tests))
    elif code != 0 and not failed:
        why = "ended with exit code %d though no test failed" % code
    if why:
        tests.append(("(the program)", "failed", output.splitlines()[-LINES_SHOWN:] + ["# the program " + why]))
    return tests


def listed(build, what="--tests"):
    """Tests, or targets, as meson knows them; empty when the folder is not configured."""
    text = subprocess.run(["meson", "introspect", what, build], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(text)


def run_one(test, environment, limit_s, wrap):
    command = [str(part) for part in test["cmd"]]
    if os.path.basename(command[0]).startswith("python3"):
        command[0] = shutil.which("python3", path=environment["PATH"]) or command[0]
    begin = time.monotonic()
    try:
        process = subprocess.Popen(wrap + command, env=environment, cwd=test.get("workdir") or None, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        return "cannot start: %s" % error, 127, False, 0.0, 0.0
    late = threading.Event()

    def end():
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    with process.stdout:
        output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # with what the process and those that it waited for have used
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return (output.decode("utf-8", "replace"), process.returncode, late.is_set(), time.monotonic() - begin,
            usage.ru_utime + usage.ru_stime)


def wanted(test, args):
    rooms = [suite.split(":")[-1] for suite in test["suite"]]
    name = "/".join(rooms[:1] + [test["name"]])
    if "soak" in rooms and not args.soak:
        return False
    if args.match and not re.search(args.match, name):
        return False
    return not (args.exclude and re.search(args.exclude, name))


def command_programs(args):
    """Ninja's names of what the tests depend on."""
    needed = {x for test in listed(args.build) if wanted(test, args) for x in test["depends"]}
    files = [x for target in listed(args.build, "--targets") if target["id"] in needed for x in target["filename"]]
    print("\n".join(os.path.relpath(x, os.path.realpath(args.build)) for x in files))
    return 0


class Run:
    """The tests of one configuration, a few at a time; workers share the list and the results."""

    def __init__(self, args):
        self.args = args
        self.lock = threading.Lock()
        self.base = dict(os.environ)
        for pair in args.env:
            key, _, value = pair.partition("=")
            self.base[key] = value
        self.queue = [t for t in listed(args.build) if wanted(t, args)]
        # The longest first (priority, then the limit), so that the end is not one program alone; a test without parallelism
        # runs last and alone.
        self.queue.sort(key=lambda t: (not t.get("is_parallel", True), -t.get("priority", 0), -t["timeout"]))
        self.results = []

    def work(self, queue):
        while True:
            with self.lock:
                if not queue:
                    return
                test = queue.pop(0)
            environment = dict(self.base)
            given = test.get("env") or {}
            environment.update({k: v for k, v in given.items() if k not in ("MALLOC_PERTURB_",)})
            limit_s = test["timeout"] if test["timeout"] > 0 else LIMIT_MAX_S
            limit_s = min(limit_s * self.args.timeout_multiplier, LIMIT_MAX_S if not self.args.soak else 48 * 3600)
            output, code, timed_out, took_s, cpu_s = run_one(test, environment, limit_s, self.args.wrap.split())
            found = judge(test["name"], output, code, limit_s, timed_out, test.get("protocol", "tap"))
            self.keep(test["name"], test["suite"][0].split(":")[-1] if test["suite"] else "", found, took_s, cpu_s)

    def keep(self, program, room, tests, took_s, cpu_s):
        count = {kind: sum(k == kind for _, k, _ in tests) for kind in ("passed", "failed", "skipped")}
        text = ", ".join("%d %s" % (n, kind) for kind, n in count.items() if n)
        with self.lock:
            self.results.append({"label": self.args.label, "program": program, "room": room, "whole": not self.args.match,
                                 "took_s": round(took_s, 2), "cpu_s": round(cpu_s, 2), "tests": [
                {"name": n, "kind": k, "lines": lines[-LINES_SHOWN:] if k != "passed" else []} for n, k, lines in tests]})
            print("   %-6s %-34s %6.1f s %6.1f cpu  %s" % (self.args.label, program, took_s, cpu_s, text), flush=True)

    def all(self):
        # What mostly waits, for a drive that is held up or for a time that it was given, takes no processor from the others: one
        # of those (suite `waits`) runs beside them.
        together = [t for t in self.queue if t.get("is_parallel", True)]
        waits = [t for t in together if any(suite.endswith(":waits") for suite in t["suite"])]
        computes = [t for t in together if t not in waits]
        alone = [t for t in self.queue if not t.get("is_parallel", True)]
        for queues in ([computes] * self.args.jobs + [waits], [alone]):
            workers = [threading.Thread(target=self.work, args=(queue,)) for queue in queues]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        return self.results


def append(path, results):
    with open(path, "a", encoding="utf-8") as out:
        for result in results:
            out.write(json.dumps(result) + "\n")


def command_run(args):
    run = Run(args)
    if not run.queue:
        append(args.results, [{"label": args.label, "program": "(none)", "took_s": 0, "tests": [
            {"name": "there is a test", "kind": "failed", "lines": ["# no test of %s matches" % args.build]}]}])
        return 1
    results = run.all()
    append(args.results, results)
    print("   %-6s %-34s %15.1f cpu" % (args.label, "all %d programs" % len(results), sum(r["cpu_s"] for r in results)), flush=True)
    return int(any(t["kind"] == "failed" for r in results for t in r["tests"]))


def command_note(args):
    lines = []
    if args.log:
        with open(args.log, encoding="utf-8", errors="replace") as log:
            lines = log.read().splitlines()[-LINES_SHOWN:]
    append(args.results, [{"label": args.label, "program": args.failed, "took_s": 0, "tests": [
        {"name": "(the program)", "kind": "failed", "lines": lines}]}])
    return 0


def rooms_of(results):
    """{room: [ran, skipped]}, and sentences about rooms of a label of which nothing ran though all of it was asked for."""
    all_rooms, labels = {}, {}
    for result in results:
        skipped = sum(t["kind"] == "skipped" for t in result["tests"])
        for found, key in ((all_rooms, result.get("room")), (labels, (result["label"], result.get("room")))):
            entry = found.setdefault(key, [0, 0, False])
            entry[0] += len(result["tests"]) - skipped
            entry[1] += skipped
            entry[2] |= result.get("whole", False)
    return ({room: (ran, skipped) for room, (ran, skipped, _) in sorted(all_rooms.items(), key=str) if room},
            ["%s: none of %d tests in the room %s ran" % (label, skipped, room)
             for (label, room), (ran, skipped, whole) in labels.items() if room and whole and not ran])


def command_summary(args):
    results = []
    if os.path.exists(args.results):
        with open(args.results, encoding="utf-8") as source:
            results = [json.loads(line) for line in source]
    count = {"passed": 0, "failed": 0, "skipped": 0}
    reasons = {}
    for result in results:
        for test in result["tests"]:
            count[test["kind"]] += 1
            if test["kind"] == "failed":
                print("\n".join(test["lines"]))
                print("FAILED: %s %s: %s" % (result["label"], result["program"], test["name"]))
            elif test["kind"] == "skipped":
                reason = "; ".join(line for line in test["lines"] if line) or "no reason given (%s)" % result["program"]
                reasons[reason] = reasons.get(reason, 0) + 1
    for reason, n in sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0])):
        print("skipped %3d: %s" % (n, reason))
    rooms, empty = rooms_of(results)
    if rooms:
        print("ran, by room: " + ", ".join("%s %d%s" % (room, ran, " (%d skipped)" % skipped if skipped else "")
                                           for room, (ran, skipped) in rooms.items()))
    for sentence in empty:
        print("FAILED: " + sentence)
    count["failed"] += len(empty)
    print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % count)
    return int(count["failed"] > 0 or count["passed"] == 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run, programs = commands.add_parser("run"), commands.add_parser("programs")
    for which in (run, programs):  # the same command line for both
        which.add_argument("--build", required=True)
        which.add_argument("--match", default="")
        which.add_argument("--exclude", default="")
        which.add_argument("--env", action="append", default=[], help="NAME=VALUE")
        which.add_argument("--wrap", default="", help="command to run each program under")
        which.add_argument("--timeout-multiplier", type=float, default=1)
        which.add_argument("--jobs", type=int, default=2)
        which.add_argument("--soak", action="store_true")
    run.add_argument("--label", required=True)
    run.add_argument("--results", required=True)
    note = commands.add_parser("note")
    note.add_argument("--label", required=True)
    note.add_argument("--results", required=True)
    note.add_argument("--failed", required=True)
    note.add_argument("--log", default="")
    summary = commands.add_parser("summary")
    summary.add_argument("--results", required=True)
    args = parser.parse_args()
    return {"run": command_run, "programs": command_programs, "note": command_note, "summary": command_summary}[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
