#!/usr/bin/env bash
# tests/gpu/accept/build.sh ROOT CUDA CUDART ARCH CC - builds a tarball's tree (accept.sh --pack) without meson, ninja and
# pkg-config: the compiler's commands that meson gave where it was packed (bundle/compile.txt, bundle/link.txt), kernels for
# one architecture, into ROOT/build-accept. Compiling is parallel, the kernels first, because they take longest.
set -euo pipefail
root=$1 cuda=$2 cudart=$3 arch=$4 cc=$5
jobs=$(nproc)
mkdir -p "$root/build-accept"
cd "$root/build-accept"

# Headers of the bundle stand behind the system's, those of CUDA's libraries behind CUDA's own.
headers="-idirafter $root/bundle/include -idirafter $root/bundle/cuda-include"
fill() {
    sed -e "s|@ROOT@|$root|g; s|@CUDA@|$cuda|g; s|@CUDART@|$cudart|g; s|@ARCH@|$arch|g; s|@CC@|$cc|g; s|@HEADERS@|$headers|g" "$1"
}
fill "$root/bundle/compile.txt" > compile.txt
# The folders of all outputs: of compilers (-o) and of ar.
grep -ohE '( -o |csrDT )[^ ]*/' compile.txt "$root/bundle/link.txt" | sed 's/.* //' | sort -u | xargs mkdir -p
tr '\n' '\0' < compile.txt | xargs -0 -n 1 -P "$jobs" sh -c 'eval "$1" || { echo "failed: $1" >&2; exit 255; }' sh
fill "$root/bundle/link.txt" | while read -r line; do eval "$line"; done
