#!/usr/bin/env python3
"""Writes the tarball of tests/gpu/accept.sh --pack.

    pack.py --root TREE --out FILE.tar.gz

Holds the tracked files of TREE, and a folder `bundle` with what a machine with nvcc and a C compiler may lack: the commands that meson
would run (compile.txt, link.txt: build.sh fills in the names there), jansson and liburing as static libraries, oneDNN as a shared one, and
their headers. hwloc is left out (cores by /sys). Needs here what `./dev build --cuda` needs; compiles nothing.
"""
import argparse, glob, os, re, shutil, subprocess, sys, tarfile, tempfile

BUILD = "build-accept-pack"  # beside build-accept, so that paths in its commands are right there
TARGETS = ["stoker", "tests/gpu/accept/gpu_card_ops"]
MAYBE = "tests/gpu/accept/gpu_card_device_ops"
LIMIT_BYTES = 60 << 20
LIBC = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|gomp|stdc\+\+)\.so|ld-linux")  # a compiler brings these


def fail(text):
    sys.exit("accept: --pack: " + text)


def run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        fail("%s: %s" % (" ".join(command[:3]), (done.stderr or done.stdout).strip()[-500:]))
    return done.stdout


def commands(root):
    """meson's commands for the targets, in order."""
    build = os.path.join(root, BUILD)
    shutil.rmtree(build, ignore_errors=True)
    for tool in ("meson", "ninja", "gcc"):
        if not shutil.which(tool):
            fail("no %s in PATH: ./dev build --cuda says what is needed" % tool)
    # a plain gcc, not a wrapper of it in PATH
    env = dict(os.environ, CC="/usr/bin/gcc" if os.path.exists("/usr/bin/gcc") else "gcc")
    done = subprocess.run(["meson", "setup", build, root, "-Dbuildtype=debugoptimized", "-Dcuda=enabled", "-Dgpu_archs=75", "-Dhwloc=disabled",
                           "-Dwerror=false"], env=env, capture_output=True, text=True)
    if done.returncode:
        fail("meson setup: " + done.stdout.strip()[-800:])
    has = run("ninja", "-C", build, "-t", "targets", "all")
    targets = TARGETS + ([MAYBE] if "\n%s:" % MAYBE in has else [])
    lines = run("ninja", "-C", build, "-t", "commands", *targets).splitlines()
    shutil.rmtree(build)
    return env["CC"], [x for x in lines if not x.startswith("ninja: ")]


def is_compile(line):
    return " -c " in line and "csrDT" not in line


def library(name):
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/local/lib", "/usr/lib64", "/usr/lib"):
        hits = sorted(glob.glob(os.path.join(folder, name)))
        if hits:
            return hits[0]
    fail("no %s in the system's library folders: ./dev build --cuda says what to install" % name)


def rewrite(line, root, cc):
    """A command of here as one of build.sh's."""
    line = line.replace(root + "/", "@ROOT@/").replace(root, "@ROOT@")
    line = re.sub(r"^(\S*/)?nvcc ", "@CUDA@/bin/nvcc ", line)
    if line.startswith(cc + " "):
        line = "@CC@ " + line[len(cc) + 1:]
    line = re.sub(r"\S*/gcc-ar |\bgcc-ar ", "ar ", line)
    line = re.sub(r"(-gencode=\S+ )+", "-gencode=arch=compute_@ARCH@,code=sm_@ARCH@ ", line)
    line = re.sub(r"-Werror all-warnings |--threads 2 ", "", line)
    line = re.sub(r"\S*/libcudart_static\.a", "@CUDART@", line)
    line = re.sub(r"-isystem ?\S*cuda\S*/include", "-isystem @CUDA@/include", line)
    line = re.sub(r"(\S*/libjansson\.so|-ljansson)", "@ROOT@/bundle/lib/libjansson.a", line)
    line = re.sub(r"(\S*/liburing\.so|-luring)", "@ROOT@/bundle/lib/liburing.a", line)
    line = re.sub(r"(\S*/libdnnl\.so|-ldnnl)", "@ROOT@/bundle/lib/libdnnl.so.2", line)
    if is_compile(line) and line.startswith("@CC@"):
        line = line.replace(" -c ", " @HEADERS@ -c ")
    elif line.startswith("@CC@"):  # old tags: for what libdnnl.so itself needs, too
        line += " -Wl,--disable-new-dtags,-rpath,@ROOT@/bundle/lib -Wl,-rpath-link,@ROOT@/bundle/lib"
    left = re.search(r"/usr/(local/cuda|lib)\S*", line)
    if left:
        fail("a path of this machine would be left in a command: %s" % left.group(0))
    return line


def gather(bundle, cuda_sources):
    lib, include, cuda_include = (os.path.join(bundle, x) for x in ("lib", "include", "cuda-include"))
    for folder in (lib, include, cuda_include):
        os.makedirs(folder)
    for name in ("libjansson.a", "liburing.a"):
        shutil.copy(library(name), lib)
    dnnl = library("libdnnl.so.2")
    shutil.copy(dnnl, os.path.join(lib, "libdnnl.so.2"))
    for line in run("ldd", dnnl).splitlines():
        got = re.match(r"\s*(\S+) => (/\S+)", line)
        if got and not LIBC.match(got.group(1)):
            shutil.copy(got.group(2), os.path.join(lib, got.group(1)))
    for pattern in ("jansson*.h", "liburing.h", "liburing", "dnnl*.h", "oneapi"):
        hits = glob.glob("/usr/include/" + pattern) + glob.glob("/usr/include/x86_64-linux-gnu/" + pattern)
        for hit in hits:
            (shutil.copytree if os.path.isdir(hit) else shutil.copy)(hit, os.path.join(include, os.path.basename(hit)))
    # headers of CUDA's libraries: a machine may have them as packages of python only, without headers where nvcc looks
    cuda = os.path.dirname(os.path.dirname(os.path.realpath(shutil.which("nvcc", path=os.environ["PATH"] + ":/usr/local/cuda/bin"))))
    wanted = ["cublasLt.h", "cublas_api.h", "cublas.h"]
    if "cudnn" in cuda_sources:
        wanted.append("cudnn*.h")
    for pattern in wanted:
        for folder in (os.path.join(cuda, "include"), "/usr/include", "/usr/include/x86_64-linux-gnu"):
            for hit in glob.glob(os.path.join(folder, pattern)):
                shutil.copy(hit, cuda_include)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--root", required=True)
    p.add_argument("--out", required=True)
    args = p.parse_args()
    root = os.path.realpath(args.root)
    cc, lines = commands(root)
    lines = [rewrite(x, root, cc) for x in lines]
    compiles = sorted((x for x in lines if is_compile(x)), key=lambda x: "nvcc" not in x)
    files = run("git", "-C", root, "ls-files", "-z").split("\0")[:-1]
    sources = "".join(open(f, encoding="utf-8", errors="replace").read() for f in glob.glob(os.path.join(root, "gpu/cuda/*.[ch]")))
    with tempfile.TemporaryDirectory() as work:
        bundle = os.path.join(work, "bundle")
        os.mkdir(bundle)
        for name, part in (("compile.txt", compiles), ("link.txt", [x for x in lines if not is_compile(x)])):
            with open(os.path.join(bundle, name), "w") as f:
                f.write("\n".join(part) + "\n")
        gather(bundle, sources)
        with tarfile.open(args.out, "w:gz", compresslevel=9) as tar:
            for name in files:
                if os.path.exists(os.path.join(root, name)):
                    tar.add(os.path.join(root, name), "stoker/" + name)
            tar.add(bundle, "stoker/bundle")
    size = os.path.getsize(args.out)
    if size > LIMIT_BYTES:
        os.remove(args.out)
        fail("the tarball would have %d MiB, more than %d" % (size >> 20, LIMIT_BYTES >> 20))
    print("accept: %s: %.1f MiB, %d files to compile; there: tar xzf, then stoker/tests/gpu/accept.sh --out DIR" %
          (args.out, size / 2**20, len(compiles)))


if __name__ == "__main__":
    main()
