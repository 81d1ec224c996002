#!/usr/bin/env python3
"""docs/cases.md: which test covers which row of the field cases (ids such as NVM-01).

    cases.py            prints TAP: the page is what the tests' names and comments say, and names no test that is not there
    cases.py --write    writes the tests' names into the page; ids and remarks are kept as they stand

A test carries an id in its name (`store_nvm_01_sizes`) or in the comment right above it.  A row's third column is a remark in words; a
row without a test needs one that begins with "not yet:" or "shown by".  Tests named in a remark are written `room/file:test`.
Only the standard library.
"""

import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join("docs", "cases.md")
ROW = re.compile(r"^\| ([A-Z0-9]{3}-\d\d) \| (.*?) \| (.*?) ?\|$")
ID = re.compile(r"(?i)(?<![a-z])(mem|nvm|adm|mpx|zr3|ckp|use|ben)[_-]?(\d\d)((?:_\d\d)*)(?!\d)")
TEST = re.compile(r"^TEST\((\w+)\)|^def test_(\w+)", re.M)
NAMED = re.compile(r"`([a-z0-9]+/\w+:\w+)`")
WHOLE = {  # every row of these has a line
    "NVM": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23 25 26 28 29 31 32 34 35 37 38 40".split(),
    "BEN": "01 02 04 05 07 08 10 11".split(),
    "MEM": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23 25 26 28 29".split(),
    "ADM": "01 02 04 05 07 08 10 11 13 14 16 17".split(),
    "MPX": "01 02 04 05 07 08 10 11 13 14".split(),
    "ZR3": "01 02 04 05 07 08 10 11 13 14 16 17 19".split(),
}


def comment_above(text, at):
    """The C comment that ends right above, if one does."""
    above = text[max(0, at - 900):at].rstrip()
    begin = above.rfind("/*")
    return above[begin:] if above.endswith("*/") and begin >= 0 else ""


def ids_of(words):
    found = set()
    for m in ID.finditer(words):
        for number in [m.group(2)] + re.findall(r"\d\d", m.group(3)):
            found.add("%s-%s" % (m.group(1).upper(), number))
    return found


def tests_of(root):
    """({test: ids}, with tests as room/file:name)."""
    tests = {}
    for folder, _, names in sorted(os.walk(os.path.join(root, "tests"))):
        for name in sorted(names):
            if not re.match(r"test_\w+\.(c|py)$", name):
                continue
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                text = f.read()
            for m in TEST.finditer(text):
                test = m.group(1) or m.group(2)
                key = "%s/%s:%s" % (os.path.basename(folder), name.rsplit(".", 1)[0], test)
                tests[key] = ids_of(test + " " + comment_above(text, m.start()))
    return tests


def column(tests, row):
    """The tests of a row, by file."""
    files = {}
    for key, ids in tests.items():
        if row in ids:
            name, test = key.split(":")
            files.setdefault(name, []).append(test)
    return "; ".join("%s: %s" % (name, ", ".join(sorted(found))) for name, found in sorted(files.items())) or "-"


def rewritten(page, tests):
    lines = []
    for line in page.split("\n"):
        m = ROW.match(line)
        lines.append("| %s | %s | %s |" % (m.group(1), column(tests, m.group(1)), m.group(3)) if m else line)
    return "\n".join(lines)


def complaints(page, tests):
    found, rows = [], {}
    for line in page.split("\n"):
        m = ROW.match(line)
        if not m:
            continue
        row, listed, remark = m.groups()
        if row in rows:
            found.append("%s stands twice" % row)
        rows[row] = True
        for part in listed.split("; ") if listed != "-" else []:
            name, _, names = part.partition(": ")
            for test in names.split(", "):
                if "%s:%s" % (name, test) not in tests:
                    found.append("%s names %s:%s, which does not exist" % (row, name, test))
        for key in NAMED.findall(remark):
            if key not in tests:
                found.append("%s names %s, which does not exist" % (row, key))
        if listed != column(tests, row):
            found.append("%s lists other tests than carry its id: run scripts/cases.py --write" % row)
        if listed == "-" and not NAMED.search(remark) and not remark.startswith(("not yet: ", "shown by ")):
            found.append("%s has no test and does not say why" % row)
    for group, numbers in WHOLE.items():
        found += ["%s-%s has no line" % (group, n) for n in numbers if "%s-%s" % (group, n) not in rows]
    for key, ids in tests.items():
        found += ["%s is the test %s's and has no line" % (row, key) for row in sorted(ids) if row not in rows]
    return found


def main():
    tests = tests_of(ROOT)
    path = os.path.join(ROOT, PAGE)
    with open(path, encoding="utf-8") as f:
        page = f.read()
    if sys.argv[1:] == ["--write"]:
        page = rewritten(page, tests)
        with open(path, "w", encoding="utf-8") as f:
            f.write(page)
    wrong = complaints(page, tests)
    # the check itself: what is planted is found
    planted = [page.replace("nvme/test_store: ", "nvme/test_store: store_that_is_not_there, ", 1),
               re.sub(r"^\| BEN-01 .*$", "", page, flags=re.M), re.sub(r"^(\| BEN-11 \| - \|) .*$", r"\1 later |", page, flags=re.M)]
    blind = [i for i, p in enumerate(planted) if p == page or not complaints(p, tests)]
    for text in wrong:
        print("# " + text)
    print("%s 1 - every row of docs/cases.md names tests that exist" % ("not ok" if wrong else "ok"))
    if blind:
        print("# planted faults that were not found: %s" % blind)
    print("%s 2 - planted faults of the page are found" % ("not ok" if blind else "ok"))
    print("1..2")
    return 1 if wrong or blind else 0


if __name__ == "__main__":
    sys.exit(main())
