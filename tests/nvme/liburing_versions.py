#!/usr/bin/env python3
"""NVM-31, the libraries: the tests of nvme/ against other versions of liburing than the system's.

    liburing_versions.py --root FOLDER [--results FILE] [--jobs N]

The sources are those that the PyPI package `liburing` carries (its version is the first of each line below); each is compiled to a static
library under FOLDER, stoker's tests of nvme/ against it, and these are run by scripts/run_tests.py, labelled with liburing's version.
What cannot be had (no network) is skipped with a line.  `./dev soak` runs this.  Only the standard library, pip and a C compiler.

A library older than nvme/meson.build accepts builds the backend that has no io_uring: transfers fall back, and say so.
"""

import argparse
import glob
import os
import subprocess
import sys
import tarfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# PyPI version, liburing's, whether stoker must build its io_uring backend with it
VERSIONS = [("2021.3.10", "2.0", False), ("2024.5.3", "2.6", True)]
SOURCES = ["setup.c", "queue.c", "register.c", "syscall.c", "version.c", "nolibc.c"]


def say(text):
    print("# " + text, flush=True)


def call(command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        raise RuntimeError("%s: %s" % (" ".join(command), done.stdout.decode()[-2000:]))


def fetched(root, package):
    """The folder of liburing's sources, or None."""
    where = os.path.join(root, "source-" + package)
    os.makedirs(where, exist_ok=True)
    if not glob.glob(os.path.join(where, "*.tar.gz")):
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--timeout", "15",
                               "--retries", "1", "-d", where, "liburing==" + package], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            say("liburing==%s cannot be had: %s" % (package, (done.stdout.decode().strip().splitlines() or ["-"])[-1]))
            return None
    with tarfile.open(glob.glob(os.path.join(where, "*.tar.gz"))[0]) as archive:
        for member in archive.getmembers():
            path = os.path.normpath(os.path.join(where, member.name))
            assert path.startswith(where + os.sep) and (member.isfile() or member.isdir()), member.name
        archive.extractall(where)
    found = glob.glob(os.path.join(where, "*", "libs", "liburing", "configure"))
    return os.path.dirname(found[0]) if found else None


def installed(root, source, version):
    """Compiles it as its own makefile would, without the parts a test needs not; returns the folder of liburing.pc."""
    prefix = os.path.join(root, "liburing-" + version)
    lib, include = os.path.join(prefix, "lib"), os.path.join(prefix, "include")
    os.makedirs(lib, exist_ok=True)
    call(["sh", "./configure", "--prefix=" + prefix], cwd=source)
    with open(os.path.join(source, "config-host.h"), encoding="utf-8") as f:
        nolibc = "CONFIG_NOLIBC" in f.read()
    objects = []
    for name in SOURCES:
        path = os.path.join(source, "src", name)
        if not os.path.exists(path) or name == "nolibc.c" and not nolibc:
            continue
        objects.append(os.path.join(lib, name[:-2] + ".o"))
        call(["cc", "-O2", "-fPIC", "-w", "-fno-builtin", "-fno-stack-protector",
              "-D_GNU_SOURCE", "-DLIBURING_INTERNAL", "-include", "signal.h", "-include", os.path.join(source, "config-host.h"),
              "-I", os.path.join(source, "src", "include"), "-I", os.path.join(source, "src"), "-c", path, "-o", objects[-1]])
    call(["ar", "rcs", os.path.join(lib, "liburing.a")] + objects)
    call(["rm", "-rf", include])
    call(["cp", "-r", os.path.join(source, "src", "include"), include])
    os.makedirs(os.path.join(lib, "pkgconfig"), exist_ok=True)
    with open(os.path.join(lib, "pkgconfig", "liburing.pc"), "w", encoding="utf-8") as f:
        f.write("prefix=%s\nName: liburing\nVersion: %s\nDescription: of a test\nLibs: %s/liburing.a\nCflags: -isystem %s\n" %
                (prefix, version, lib, include))
    return os.path.join(lib, "pkgconfig")


def run(root, version, has_ring, package_config, results, jobs):
    """Builds and runs the tests of nvme/; True: all passed."""
    build = os.path.join(root, "build-" + version)
    environment = dict(os.environ, PKG_CONFIG_PATH=package_config)
    if not os.path.exists(os.path.join(build, "build.ninja")):
        call(["meson", "setup", build, ROOT, "-Dbuildtype=debugoptimized"], env=environment)
    runner = [sys.executable, os.path.join(ROOT, "scripts", "run_tests.py")]
    chosen = ["--build", build, "--match", "^nvme/"]
    programs = subprocess.run(runner + ["programs"] + chosen, check=True, stdout=subprocess.PIPE).stdout.decode().split()
    rings = [p for p in programs if p.endswith(("test_nvme_uring", "test_nvme_kernels"))]
    if bool(rings) != has_ring:
        say("liburing %s: the io_uring backend is %s" % (version, "not built" if has_ring else "built, and should not be"))
        return False
    call(["ninja", "-C", build, "-j", str(jobs)] + programs)
    say("liburing %s: %d programs" % (version, len(programs)))
    return subprocess.run(runner + ["run", "--results", results, "--label", "liburing-" + version, "--jobs", str(jobs),
                                    "--timeout-multiplier", "3"] + chosen).returncode == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--results")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    root = os.path.abspath(args.root)
    os.makedirs(root, exist_ok=True)
    results = args.results or os.path.join(root, "results")
    right = tried = 0
    for package, version, has_ring in VERSIONS:
        source = fetched(root, package)
        if not source:
            continue
        tried += 1
        right += run(root, version, has_ring, installed(root, source, version), results, args.jobs)
    say("%d of %d versions of liburing right" % (right, tried))
    return 0 if right == tried else 1


if __name__ == "__main__":
    sys.exit(main())
