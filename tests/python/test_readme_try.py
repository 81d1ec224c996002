#!/usr/bin/env python3
"""The lines that the README says work without a model at hand do, as they stand there.  Prints TAP; standard library only."""

import os
import re
import subprocess
import sys
import tempfile
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STOKER = os.environ.get("STOKER_BINARY", os.path.join(ROOT, "build", "stoker"))


def commands():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as source:
        block = source.read().split("<!-- try:begin -->")[1].split("<!-- try:end -->")[0]
    return [line for line in block.strip().strip("`").strip().splitlines() if line]


def test_three_lines(folder):
    """In a folder that looks like the top of the tree, so that the tree itself stays as it is."""
    for name in ("README.md", "docs", "examples"):
        os.symlink(os.path.join(ROOT, name), os.path.join(folder, name))
    os.mkdir(os.path.join(folder, "build"))
    os.symlink(os.path.abspath(STOKER), os.path.join(folder, "build", "stoker"))
    lines = commands()
    assert len(lines) == 3 and all(line.startswith("build/stoker ") for line in lines), lines
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              universal_newlines=True, timeout=120)
        assert done.returncode == 0, "%s\n%s" % (line, done.stdout[-2000:])
    losses = [float(x) for x in re.findall(r"^step .* loss ([0-9.]+) ", done.stdout, re.M)]
    print("# loss %.2f at first, %.2f at last" % (losses[0], losses[-1]))
    assert losses[-1] < losses[0] - 1, losses
    assert os.path.exists(os.path.join(folder, "tiny-tuned", "model.safetensors"))
    assert not [name for name in os.listdir(folder) if name.startswith("stoker-run")], "a store was left"


def main():
    with tempfile.TemporaryDirectory(prefix="stoker-readme-", dir=os.environ.get("STOKER_TEST_DIR")) as folder:
        try:
            test_three_lines(folder)
            print("ok 1 - three_lines\n1..1")
            return 0
        except Exception:
            print("".join("# %s\n" % line for line in traceback.format_exc().splitlines()[-30:]) + "not ok 1 - three_lines\n1..1")
            return 1


if __name__ == "__main__":
    sys.exit(main())
