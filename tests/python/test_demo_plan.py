#!/usr/bin/env python3
"""The demo's training command still fits the device memory that it is given, and that is still less than the parameters
take: `demo.sh` with DEMO_ONLY=plan (a random model, random tokens, a dry run).  Prints TAP; standard library only."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEMO = os.path.join(ROOT, "examples", "demo", "demo.sh")
STOKER = os.environ.get("STOKER_BINARY", os.path.join(ROOT, "build", "stoker"))
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# --matmul and --threads are all that a machine chooses for the user.
MATMULS, THREADS = ("auto", "f32", "bf16"), (1, 2, 16)


def given():
    """The environment without what somebody set for a demo of his own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DEMO_")}


def demo(folder, **settings):
    return subprocess.run(["bash", DEMO, STOKER, folder], env=dict(given(), DEMO_ONLY="plan", **settings), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, timeout=300)


def planned(folder, options, memory=None):
    """Only the demo's own command again, on the model that the first call has made: (exit code, output)."""
    command = planned.command + options
    if memory:
        command[command.index("--device-memory") + 1] = memory
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True,
                          timeout=120)
    return done.returncode, done.stdout


def size(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def row(out, tier, owner):
    found = re.search(r"^ +%s +%s +([0-9.]+ [KMG]?i?B)$" % (tier, re.escape(owner)), out, re.M)
    assert found, "no row '%s %s' in:\n%s" % (tier, owner, out)
    return size(found.group(1))


def test_plan_of_the_demo(folder):
    """What a user sees, whole; and the command that it shows is the one that the other tests vary."""
    done = demo(folder)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = [line for line in done.stdout.splitlines() if " train " in line and "--dry-run" in line]
    assert len(lines) == 1, done.stdout
    planned.command = lines[0].strip().lstrip("$ ").split()
    cap = re.search(r"--device-memory (\d+)MiB", lines[0])
    assert cap, lines[0]
    planned.cap = int(cap.group(1)) << 20
    parameters = row(done.stdout, "nvme", "parameters (16-bit)")
    assert planned.cap < parameters, "the cap of %d is not below the parameters' %d bytes" % (planned.cap, parameters)
    assert not os.path.exists(os.path.join(folder, "reference")), "a dry run left something"


def test_fits_whatever_the_machine_chooses(folder):
    for i, matmul in enumerate(MATMULS):
        for k, threads in enumerate(THREADS):
            options = ["--matmul", matmul, "--threads", str(threads)]
            if i != k:  # each value once with what is measured for the choice of the update; seconds each time
                options += ["--predict", "off"]
            code, out = planned(folder, options)
            assert code == 0, "%s: does not fit:\n%s" % (" ".join(options), out[-1500:])
            used = row(out, "device", "total")
            assert used <= planned.cap, (options, used)
            print("# %-28s %.2f of %d MiB" % (" ".join(options), used / (1 << 20), planned.cap >> 20))


def test_would_notice(folder):
    """The same with a cap that is too small is refused by name: the tests above can fail."""
    code, out = planned(folder, [], "30MiB")
    assert code == 1 and "--device-memory" in out, (code, out[-1500:])
    done = demo(folder, DEMO_DEVICE_MEMORY="30MiB")
    assert done.returncode == 1 and "--device-memory" in done.stdout, (done.returncode, done.stdout[-1500:])


def test_settings_are_checked(folder):
    done = subprocess.run(["bash", DEMO, STOKER, folder], env=dict(given(), DEMO_ONLY="pla"), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=60)
    assert done.returncode == 2 and "DEMO_ONLY=pla" in done.stderr, done


def main():
    tests = [test_plan_of_the_demo, test_fits_whatever_the_machine_chooses, test_would_notice, test_settings_are_checked]
    failed = 0
    folder = tempfile.mkdtemp(prefix="stoker-demo-plan-", dir=os.environ.get("STOKER_TEST_DIR"))
    try:
        for number, test in enumerate(tests, 1):
            try:
                test(os.path.join(folder, "demo"))
                print("ok %d - %s" % (number, test.__name__[5:]), flush=True)
            except Exception:
                failed += 1
                print("".join("# %s\n" % line for line in traceback.format_exc().splitlines()[-30:]), end="")
                print("not ok %d - %s" % (number, test.__name__[5:]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("1..%d" % len(tests))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
