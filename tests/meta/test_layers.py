#!/usr/bin/env python3
"""The rules of the tree: which room may include what (docs/architecture.md), and habits a reader relies on.

Prints TAP; only the standard library. Each rule is a function from a tree, {path: text}, to complaints. The first test plants
one violation of every rule in a temporary folder and expects each to be found: a rule that finds nothing is no rule.
"""

import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

BELOW = {  # a room may include itself and these
    "base": [],
    "nvme": ["base"],
    "gpu": ["base"],
    "formats": ["base"],
    "offload": ["base", "nvme", "gpu", "formats"],
    "engine": ["base", "nvme", "gpu", "formats", "offload"],
    "bench": ["base", "nvme", "gpu", "formats", "offload", "engine"],
    "trainer": ["base", "formats", "gpu", "engine", "bench"],
}
ONLY = {  # and of these rooms only these headers
    ("trainer", "engine"): {"engine/stoker.h"},
    ("trainer", "bench"): {"bench/bench.h"},
    # engine.h: bench/overlap_model.c asks the machine's model of a device for what a plan's nodes take alone;
    # machine.h: and predicts the step whose norm binds, which stk_predict does not
    ("bench", "engine"): {"engine/stoker.h", "engine/engine.h", "engine/machine.h", "engine/predict.h", "engine/plan.h"},
    ("trainer", "gpu"): {"gpu/ops.h", "gpu/device.h"},
    ("engine", "nvme"): {"nvme/io.h", "nvme/store.h", "nvme/io_sim.h", "nvme/measure.h", "nvme/drive.h"},
    ("engine", "gpu"): {"gpu/device.h", "gpu/ops.h", "gpu/coll.h"},
    ("offload", "nvme"): {"nvme/io.h", "nvme/store.h"},
    ("offload", "gpu"): {"gpu/device.h", "gpu/ops.h", "gpu/coll.h"},
    ("examples", "engine"): {"engine/stoker.h"},
}
BORDER_ALLOWED = {  # single includes across a border, and why
    ("trainer/cmd_doctor.c", "nvme/io.h"): "asks whether this machine lets io_uring and O_DIRECT work",
    ("trainer/run.h", "nvme/io_sim.h"): "a simulated run's disk, handed to the engine through stk_config.sim_disk",
}
SYSTEM = [  # a library's header, and where it may be seen
    (r"liburing\.h|linux/io_uring\.h", r"nvme/io_uring"),
    (r"oneapi/dnnl/|dnnl", r"gpu/host/"),
    (r"cuda|cublas|cudnn", r"gpu/cuda/"),
    (r"nccl|mpi\.h", r"gpu/coll_"),
    (r"hwloc", r"base/topology_hwloc"),
    (r"pthread\.h|threads\.h|semaphore\.h", r"(base|gpu/host|gpu/cuda)/"),  # gpu: a lock around the queue of a stream
    (r"omp\.h", r"(gpu/host|offload|base|bench)/"),
    (r"immintrin\.h|x86intrin\.h|nmmintrin\.h|wmmintrin\.h", r"(base/|offload/|nvme/|gpu/host/|formats/crc32_x86\.c|bench/limit_isa\.c)"),
    (r"jansson\.h", r"(base|formats|bench|trainer)/"),
]
LINES_MAX = 800
COLUMNS_HABIT, COLUMNS_MAX = 100, 160      # the habit is counted, the limit is kept
FUNCTION_HABIT, FUNCTION_MAX = 70, 120

# Library rooms ask the machine through base/sys.h, so that a test can fail each call. What may stand outside, and why.
CALLS = r"malloc|calloc|realloc|free|strdup|posix_memalign|aligned_alloc|open|fopen|pread|pwrite|read|write"
CALLS_ALLOWED = {
    ("engine/api.c", "fopen"): "the drawn plan is a stream for a person, written once, before step 1",
    ("engine/counters.c", "free"): "text that jansson allocated",
    ("engine/trace.c", "fopen"): "a stream for a person, written between steps when asked for",
    ("formats/files.c", "free"): "names that scandir allocated",
    ("formats/manifest.c", "free"): "text that jansson allocated, names that scandir allocated",
    ("formats/model_config.c", "free"): "text that jansson allocated",
    ("formats/model_config_keys.c", "free"): "text that jansson allocated",
    ("nvme/io_uring.c", "read"): "an eventfd",
    ("nvme/io_uring.c", "write"): "an eventfd",
}
MARKS = ["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "TB" + "D"]
MACHINE_PATHS = re.compile(r"(?<![\w.$}\-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me"]) + r")/|bash" + r"_jobs")
TEXT = (".c", ".h", ".inc", ".py", ".md", ".sh", ".build", ".txt", ".toml")


def load(root):
    """Text files of a tree: what git knows or would add; everything but build folders where there is no git."""
    try:
        listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode()
        paths = [p for p in listed.split("\0") if p]
    except (OSError, subprocess.CalledProcessError):
        paths = []
        for folder, folders, names in os.walk(root):
            folders[:] = [f for f in folders if not f.startswith((".", "build", "demo-out"))]
            paths += [os.path.relpath(os.path.join(folder, name), root) for name in names]
    tree = {}
    for path in paths:
        full = os.path.join(root, path)
        if (path.endswith(TEXT) or path in ("dev", ".ci/run")) and os.path.isfile(full):
            with open(full, encoding="utf-8") as source:
                tree[path] = source.read()
    return tree


def room_of(path):
    return path.split("/")[0]


def is_c(path):
    return path.endswith((".c", ".h", ".inc", ".cu"))


def in_library(path):
    return is_c(path) and room_of(path) in ("base", "nvme", "gpu", "formats", "offload", "engine")


def code_of(text):
    """The text without comments and without what stands in quotes; lines stay where they are."""
    def blank(found):
        return re.sub(r"[^\n]", " ", found.group(0)) if found.group(0)[0] == "/" else '""'
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def includes(text):
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r'\s*#\s*include\s+(["<])([^">]+)[">]', line)
        if found:
            yield number, found.group(1) == '"', found.group(2)


def rule_layers(tree):
    bad = []
    for path, text in tree.items():
        room = room_of(path)
        if not is_c(path) or (room not in BELOW and not path.startswith("examples/")):
            continue
        for number, quoted, header in includes(text):
            if not quoted or (path, header) in BORDER_ALLOWED:
                continue
            other = room_of(header)
            if "/" not in header or header.startswith("."):
                if not path.startswith("examples/"):
                    bad.append("%s:%d: \"%s\" is not written from the root" % (path, number, header))
            elif (room, other) in ONLY and header not in ONLY[room, other]:
                bad.append("%s:%d: %s may not include %s" % (path, number, room, header))
            elif other != room and other not in BELOW.get(room, ["engine"]):
                bad.append("%s:%d: %s may not include %s, which is not below it" % (path, number, room, header))
    return bad


def rule_private_headers(tree):
    """*_impl.h and *_priv.h are for their own room, and for its tests."""
    bad = []
    for path, text in tree.items():
        if not is_c(path) or room_of(path) in ("tests", "bench"):
            continue
        for number, quoted, header in includes(text):
            if quoted and re.search(r"_(impl|priv)\.h$", header) and room_of(header) != room_of(path):
                bad.append("%s:%d: %s is private to its room" % (path, number, header))
    return bad


def rule_system_headers(tree):
    bad = []
    for path, text in tree.items():
        if not is_c(path) or room_of(path) not in BELOW:
            continue
        for number, quoted, header in includes(text):
            for pattern, where in SYSTEM:
                if not quoted and re.match(pattern, header) and not re.match(where, path):
                    bad.append("%s:%d: <%s> belongs to %s only" % (path, number, header, where))
    return bad


def rule_public_header(tree):
    """engine/stoker.h is installed alone."""
    return ["engine/stoker.h:%d: includes %s" % (number, header) for number, _, header in includes(tree.get("engine/stoker.h", ""))
            if header not in ("stdbool.h", "stddef.h", "stdint.h")]


def rule_no_output_no_exit(tree):
    bad = []
    for path, text in tree.items():
        if not in_library(path):
            continue
        for number, line in enumerate(code_of(text).splitlines(), 1):
            found = re.search(r"(?<![\w.>])(printf|puts|perror|exit|_exit|abort)\s*\(", line)
            if found and not (path == "base/status.c" and found.group(1) == "abort"):  # STK_ASSERT
                bad.append("%s:%d: %s() in the library" % (path, number, found.group(1)))
    return bad


def rule_calls(tree):
    bad, used = [], set()
    for path, text in tree.items():
        if not in_library(path) or room_of(path) == "base":
            continue
        for number, line in enumerate(code_of(text).splitlines(), 1):
            for found in re.finditer(r"(?<![\w.>*])(" + CALLS + r")\s*\(", line):
                key = (path, found.group(1))
                used.add(key)
                if key not in CALLS_ALLOWED:
                    bad.append("%s:%d: %s() without base/sys.h" % (path, number, key[1]))
    return bad + ["%s is excepted for %s(), which it does not call" % key for key in CALLS_ALLOWED
                  if key not in used and key[0] in tree]


def rule_size(tree):
    bad = []
    for path, text in tree.items():
        if not path.endswith((".c", ".h", ".inc", ".py", ".sh")) and path != "dev":
            continue
        lines = text.splitlines()
        if len(lines) > LINES_MAX:
            bad.append("%s: %d lines, at most %d" % (path, len(lines), LINES_MAX))
        bad += ["%s:%d: %d columns, at most %d" % (path, number, len(line), COLUMNS_MAX)
                for number, line in enumerate(lines, 1) if len(line) > COLUMNS_MAX]
    return bad


def functions(text):
    """(first line, length) of each body that begins with a brace in the first column."""
    begin = None
    for number, line in enumerate(text.splitlines(), 1):
        if line == "{":
            begin = number
        elif line == "}" and begin:
            yield begin, number - begin + 1
            begin = None


def rule_functions(tree):
    return ["%s:%d: a function of %d lines, at most %d" % (path, number, length, FUNCTION_MAX)
            for path, text in tree.items() if path.endswith(".c") for number, length in functions(text) if length > FUNCTION_MAX]


def rule_openers(tree):
    """A .c file says first what it owns and what it must not know."""
    return ["%s: does not open with a comment" % path for path, text in tree.items()
            if path.endswith(".c") and room_of(path) in BELOW and not text.startswith("/*")]


def rule_marks(tree):
    pattern = re.compile(r"\b(?:" + "|".join(MARKS) + r")\b")
    return ["%s:%d: a left-over mark" % (path, number) for path, text in tree.items()
            for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def rule_machine_paths(tree):
    return ["%s:%d: a path of one machine" % (path, number) for path, text in tree.items()
            for number, line in enumerate(text.splitlines(), 1) if MACHINE_PATHS.search(line)]


def rule_readme(tree):
    readme = tree.get("README.md", "")
    first_screen = "\n".join(readme.splitlines()[:40])
    return ["README.md: its first screen does not name %s" % word for word in ("./dev demo", "./dev test") if word not in first_screen]


def rule_links(tree):
    """A file named in the documentation exists."""
    bad = []
    for path in ("README.md", "docs/architecture.md"):
        for name in re.findall(r"`((?:%s|examples|tests|docs|scripts|python)/[\w./-]+\.(?:c|h|inc|py|md|sh|build))`"
                               % "|".join(BELOW), tree.get(path, "")):
            if name not in tree:
                bad.append("%s: names %s, which is not there" % (path, name))
    return bad


RULES = [rule_layers, rule_private_headers, rule_system_headers, rule_public_header, rule_no_output_no_exit, rule_calls,
         rule_size, rule_functions, rule_openers, rule_marks, rule_machine_paths, rule_readme, rule_links]

HEAD = "/* x.c - nothing. */\n"
PLANTED = {  # rule: files of which each must be complained about
    "rule_layers": {"base/a.c": HEAD + '#include "engine/plan.h"\n', "nvme/a.c": HEAD + '#include "gpu/device.h"\n',
                    "engine/a.c": HEAD + '#include "trainer/model.h"\n', "trainer/a.c": HEAD + '#include "engine/plan.h"\n',
                    "gpu/a.c": HEAD + '#include "device.h"\n', "trainer/b.c": HEAD + '#include "nvme/io.h"\n',
                    "trainer/d.c": HEAD + '#include "bench/nvme_impl.h"\n',
                    "examples/c/a.c": HEAD + '#include "gpu/ops.h"\n', "formats/a.c": HEAD + '  #  include "../base/sys.h"\n'},
    "rule_private_headers": {"offload/b.c": HEAD + '#include "gpu/device_impl.h"\n'},
    "rule_system_headers": {"engine/b.c": HEAD + "#include <liburing.h>\n", "trainer/c.c": HEAD + "#include <oneapi/dnnl/dnnl.h>\n",
                            "engine/c.c": HEAD + "#include <cuda_runtime.h>\n",
                            "base/c.c": HEAD + "#include <hwloc.h>\n", "nvme/c.c": HEAD + "#include <pthread.h>\n"},
    "rule_public_header": {"engine/stoker.h": HEAD + '#include "base/status.h"\n'},
    "rule_no_output_no_exit": {"nvme/d.c": HEAD + "void f(void) { if (1) exit(1); }\n", "base/d.c": HEAD + "int x = printf(\"\");\n"},
    "rule_calls": {"engine/d.c": HEAD + "void *p = malloc(1);\n", "nvme/e.c": HEAD + "int n = pread(1, 0, 0, 0);\n"},
    "rule_size": {"gpu/long.c": HEAD + "\n" * LINES_MAX, "gpu/wide.c": HEAD + "/*" + "-" * COLUMNS_MAX + "*/\n"},
    "rule_functions": {"gpu/f.c": HEAD + "void f(void)\n{\n" + "    ;\n" * FUNCTION_MAX + "}\n"},
    "rule_openers": {"gpu/bare.c": "int x;\n"},
    "rule_marks": {"docs/a.md": "a " + MARKS[0] + ": b\n", "dev": "# " + MARKS[1] + "\n"},
    "rule_machine_paths": {"docs/b.md": "see /" + "ro" + "ot/x\n", "scripts/a.sh": "cd /" + "wo" + "rk/y\n"},
    "rule_readme": {"README.md": "# what\n"},
    "rule_links": {"docs/architecture.md": "see `base/missing.c`\n"},
}
INNOCENT = {  # looks like a violation and is none
    "engine/ok.c": HEAD + '#include "base/sys.h"\n#include <string.h>\n/* malloc(1); exit(1); printf() */\n'
                   'const char *s = "exit(1) malloc(2)";\nvoid f(void) { x->open(1); y.free(2); sys_free(3); stk_exit(4); }\n',
    "gpu/host/ok.c": HEAD + "#include <oneapi/dnnl/dnnl.h>\n", "README.md": "./dev demo ./dev test\n",
}


def write_tree(root, files):
    for path, text in files.items():
        os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
        with open(os.path.join(root, path), "w", encoding="utf-8") as out:
            out.write(text)


def test_planted_violations_are_found():
    bad = []
    for rule in RULES:
        planted = PLANTED.get(rule.__name__)
        if not planted:
            bad.append("%s: nothing is planted for it" % rule.__name__)
            continue
        with tempfile.TemporaryDirectory() as root:
            write_tree(root, planted)
            found = rule(load(root))
        bad += ["%s did not find %s" % (rule.__name__, path) for path in planted if not any(c.startswith(path) for c in found)]
    with tempfile.TemporaryDirectory() as root:
        write_tree(root, INNOCENT)
        tree = load(root)
    bad += ["found in an innocent file: " + c for rule in RULES for c in rule(tree)]
    return bad


def main():
    tree = load(ROOT)
    tests = [("planted_violations_are_found", test_planted_violations_are_found)]
    tests += [(rule.__name__[len("rule_"):], lambda rule=rule: rule(tree)) for rule in RULES]
    failed = 0
    for number, (name, test) in enumerate(tests, 1):
        bad = test()
        failed += bool(bad)
        for complaint in bad[:20]:
            print("# " + complaint)
        print("%s %d - %s" % ("not ok" if bad else "ok", number, name))
    wide = sum(len(line) > COLUMNS_HABIT for path, text in tree.items() if is_c(path) for line in text.splitlines())
    long = sum(n > FUNCTION_HABIT for path, text in tree.items() if path.endswith(".c") for _, n in functions(text))
    print("# %d lines beyond %d columns, %d functions beyond %d lines" % (wide, COLUMNS_HABIT, long, FUNCTION_HABIT))
    print("1..%d" % len(tests))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
