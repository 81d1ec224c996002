#!/usr/bin/env python3
"""What `meson install` gives, in a temporary folder: the library's symbols, the header, stoker.pc, the command; and programs
outside this tree that are compiled and run with nothing else. Prints TAP.

    test_install.py --build BUILD-FOLDER      (built in full)
"""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLES = os.path.join(ROOT, "examples", "c")
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import exports  # noqa: E402

STRICT = ["-std=c11", "-O2", "-Wall", "-Werror"]
HOW_TO_RUN = {  # a new example says here how it is run in seconds; FOLDER is an empty one
    "mlp": ["FOLDER"],
    "swap": ["--memory", "8", "--times", "3", "--passes", "2", "FOLDER"],
}
HEADER_OF_ALL = """/* declares nothing: void stk_a(void); */
#define STK_CALL(x) stk_b(x)
#define STK_LONG(x) \\
    stk_c(x)
extern "C" {
typedef struct stk_s { int stk_field; /* stk_d() */ enum { STK_E = sizeof(int) } k; } stk_s;
const char *stk_one(void); // stk_f()
stk_s *stk_two(int a,
               int b);
}
"""


SMALL = """#include <stoker.h>
#include <stdio.h>
int main(void)
{
    stk_config c;
    stk_engine *e;
    stk_config_init(&c, sizeof c);
    stk_status st = stk_open(&c, &e);
    printf("%s %s\\n", stk_version(), e ? stk_error_text(e) : stk_status_name(st));
    stk_close(e);
    return st;
}
"""


class Skip(Exception):
    pass


def run(*command, env=None, cwd=None):
    """Standard output; a program that fails is an error with what it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, cwd=cwd,
                          env=dict(os.environ, **(env or {})))
    if done.returncode != 0:
        raise AssertionError("%s: exit code %d\n%s" % (" ".join(command), done.returncode, done.stdout))
    return done.stdout


class Installed:
    """The installed tree, in a folder that stands for the root of another machine."""

    def __init__(self, build, folder):
        self.folder, self.root = folder, os.path.join(folder, "root")
        run("meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", self.root)
        self.files = {}  # name: full path
        for where, _, names in os.walk(self.root):
            self.files.update((name, os.path.join(where, name)) for name in names)
        self.header = self.files["stoker.h"]
        self.shared = self.files["libstoker.so"]
        self.library_folder = os.path.dirname(self.shared)

    def pkg_config(self, *options):
        env = {"PKG_CONFIG_PATH": os.path.dirname(self.files["stoker.pc"]), "PKG_CONFIG_SYSROOT_DIR": self.root,
               "PKG_CONFIG_ALLOW_SYSTEM_CFLAGS": "1", "PKG_CONFIG_ALLOW_SYSTEM_LIBS": "1"}  # a prefix of /usr counts too
        return run("pkg-config", *options, "stoker", env=env).split()

    def source(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
        return path

    def compile(self, source, program, *more):
        """As the README says, and no more; -lm is what the program itself asks for."""
        out = os.path.join(self.folder, program)
        run("cc", *STRICT, source, *(more or self.pkg_config("--cflags", "--libs")), "-lm", "-o", out, cwd=self.folder)
        return out

    def run_example(self, program, name):
        work = tempfile.mkdtemp(dir=self.folder)
        run(program, *[work if word == "FOLDER" else word for word in HOW_TO_RUN[name]],
            env={"LD_LIBRARY_PATH": self.library_folder}, cwd=work)
        left = os.listdir(work)
        assert not left, "%s left %s behind" % (name, left)


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path))


def examples():
    return sorted(name[:-2] for name in os.listdir(EXAMPLES) if name.endswith(".c"))


def header_names():
    with open(exports.HEADER, encoding="utf-8") as source:
        return exports.declared(source.read())


def test_export_list_is_of_the_header(_):
    assert exports.declared(HEADER_OF_ALL) == ["stk_one", "stk_two"], exports.declared(HEADER_OF_ALL)
    with open(exports.MAP, encoding="utf-8") as source:
        assert source.read() == exports.version_script(header_names()), "stale: scripts/exports.py --write"


def test_export_list_is_what_the_compiler_sees(installed):
    out = os.path.join(installed.folder, "declared")
    if "Free Software Foundation" not in run("cc", "--version"):
        raise Skip("only gcc lists declarations")
    run("cc", "-std=c11", "-fsyntax-only", "-aux-info", out, "-x", "c", installed.header)
    with open(out, encoding="utf-8") as source:
        seen = re.findall(r"^/\* %s:.*?\*/[^(]*?(\w+) \(" % re.escape(installed.header), source.read(), flags=re.M)
    assert sorted(seen) == header_names(), sorted(set(seen) ^ set(header_names()))


def test_library_exports_the_header_and_nothing_else(installed):
    listed = [line.split() for line in run("nm", "-D", "--defined-only", installed.shared).splitlines()]
    found = {name: kind for _, kind, name in listed if name != exports.NODE}
    versioned = {"%s@@%s" % (name, exports.NODE) for name in header_names()}
    missing, more = sorted(versioned - set(found)), sorted(set(found) - versioned)
    assert not missing, "declared in stoker.h and not exported: %s" % ", ".join(missing)
    assert not more, "exported and not declared in stoker.h: %s" % ", ".join(more)
    assert set(found.values()) == {"T"}, "not all are functions: %s" % found


def test_what_is_installed(installed):
    found = set(installed.files)
    expected = {"stoker", "stoker.h", "stoker.pc", "libstoker.a", "libstoker.so", "README.md"} | set(
        name for name in os.listdir(os.path.join(ROOT, "share", "machines")) if name.endswith(".json"))
    numbered = {name for name in found if re.fullmatch(r"libstoker\.so\.[\d.]+", name)}
    assert found - numbered == expected, found ^ expected
    assert len(numbered) == 2, numbered
    assert installed.header.endswith("/include/stoker.h") and installed.files["stoker"].endswith("/bin/stoker")
    for name in ("stoker", "libstoker.so"):  # nothing is looked for in the build folder
        assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", run("readelf", "-d", installed.files[name])), name
    soname = re.search(r"\(SONAME\).*\[(.*)\]", run("readelf", "-d", installed.shared)).group(1)
    assert soname in numbered and exports.NODE == "STOKER_" + soname.split(".so.")[1], soname


def test_versions_agree(installed):
    library = ctypes.CDLL(installed.shared)
    library.stk_version.restype = ctypes.c_char_p
    version = library.stk_version().decode()
    with open(installed.header, encoding="utf-8") as source:
        macros = re.findall(r"#define STK_VERSION_M(?:AJ|IN)OR (\d+)", source.read())
    assert installed.pkg_config("--modversion") == [version]
    assert version.split(".")[:2] == macros, (version, macros)
    assert run(installed.files["stoker"], "--version").split() == ["stoker", version]
    assert os.path.realpath(installed.shared).endswith(".so." + version)


def test_header_alone(installed):
    pedantic = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    run("cc", "-std=c11", *pedantic, "-x", "c", installed.header)
    plus = shutil.which("g++") or shutil.which("clang++")
    if not plus:
        raise Skip("the C part passed; no C++ compiler")
    for standard in ("c++11", "c++20"):
        run(plus, "-std=" + standard, *pedantic, "-x", "c++", installed.header)


def test_examples_on_the_shared_library(installed):
    assert "mlp" in examples()
    for name in examples():
        assert name in HOW_TO_RUN, "%s.c: HOW_TO_RUN of this test does not know it" % name
        program = installed.compile(os.path.join(EXAMPLES, name + ".c"), name)
        assert set(needed(program)) <= {"libstoker.so.0", "libm.so.6", "libc.so.6"}, needed(program)
        installed.run_example(program, name)


def test_static_library(installed):
    flags = [{"-lstoker": "-l:libstoker.a"}.get(word, word) for word in installed.pkg_config("--static", "--cflags", "--libs")]
    assert "-l:libstoker.a" in flags, flags
    program = installed.compile(installed.source("small.c", SMALL), "small", *flags)
    assert not [name for name in needed(program) if "stoker" in name]
    run(program)


def test_internal_names_do_not_link(installed):
    inner = "sys_mkdirs"  # any function of a room that is not in stoker.h
    assert re.search(r" T %s$" % inner, run("nm", installed.files["libstoker.a"]), flags=re.M), "%s is no more: name another" % inner
    source = installed.source("inside.c", "int %s(void);\nint main(void) { return %s(); }\n" % (inner, inner))
    try:
        installed.compile(source, "inside")
    except AssertionError as error:
        assert "undefined reference to `%s'" % inner in str(error), error
    else:
        raise AssertionError("a program calls what is not in stoker.h")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    build = os.path.abspath(parser.parse_args().build)
    tests = [(name, fn) for name, fn in sorted(globals().items()) if name.startswith("test_")]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="stoker-install-") as folder:
        installed = Installed(build, folder)
        for number, (name, fn) in enumerate(tests, 1):
            try:
                fn(installed)
                print("ok %d - %s" % (number, name))
            except Skip as why:
                print("ok %d - %s # SKIP %s" % (number, name, why))
            except Exception as error:  # a test that breaks is a failed test
                failed += 1
                print("# %s\nnot ok %d - %s" % (str(error or repr(error)).replace("\n", "\n# "), number, name))
    print("1..%d" % len(tests))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
