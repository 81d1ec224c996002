#!/usr/bin/env python3
"""The options in README.md are those of `stoker train --help`.

    readme_options.py [--write] [--stoker PATH]

Without --write: prints TAP; fails when they differ, is skipped when the program is not built.
"""

import argparse
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = "<!-- options:begin -->\n", "<!-- options:end -->\n"


def section(stoker):
    text = subprocess.run([stoker, "train", "--help"], check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout
    lines = text.rstrip("\n").splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("  --")), 0)
    return BEGIN + "```\n" + "\n".join(lines[first:]) + "\n```\n" + END


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--stoker", default=os.path.join(ROOT, "build", "stoker"))
    args = parser.parse_args()
    if not os.access(args.stoker, os.X_OK):
        print("1..0 # SKIP %s is not built" % os.path.basename(args.stoker))
        return 1 if args.write else 0
    path = os.path.join(ROOT, "README.md")
    with open(path, encoding="utf-8") as source:
        readme = source.read()
    before, rest = readme.split(BEGIN)
    wanted = before + section(args.stoker) + rest.split(END)[1]
    if args.write:
        with open(path, "w", encoding="utf-8") as out:
            out.write(wanted)
        return 0
    if wanted == readme:
        print("ok 1 - readme_lists_the_options\n1..1")
        return 0
    print("# README.md differs from `stoker train --help`: run python3 scripts/readme_options.py --write")
    print("not ok 1 - readme_lists_the_options\n1..1")
    return 1


if __name__ == "__main__":
    sys.exit(main())
