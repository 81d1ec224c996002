#!/usr/bin/env bash
# What the demo needs beyond the build: the text's package and the tokenizer library.
#
#   setup.sh FOLDER      writes FOLDER/bible.data, and FOLDER/venv if python3 lacks `tokenizers`
#
# Changes nothing outside FOLDER: the Debian package is downloaded and unpacked, not installed, and
# Python packages go into a virtual environment.  Finds both again when run twice.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: setup.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
package=bible-kjv-text

fail() { echo "demo setup: $*" >&2; exit 1; }

fetch_text() {
    local scratch
    scratch=$(mktemp -d "$folder/fetch.XXXXXX")
    # The first try fails on machines whose package lists are empty, as fresh containers have them.
    if ! (cd "$scratch" && apt-get download "$package") > "$scratch/log" 2>&1; then
        if [ "$(id -u)" -eq 0 ]; then apt-get update > "$scratch/log" 2>&1 || true; fi
        (cd "$scratch" && apt-get download "$package") > "$scratch/log" 2>&1 ||
            { cat "$scratch/log" >&2; fail "cannot download the Debian package $package; install" \
              "it (apt-get install $package) and try again"; }
    fi
    dpkg-deb -x "$scratch"/*.deb "$scratch/files"
    mv "$scratch/files/usr/lib/bible.data" "$folder/bible.data"
    rm -r "$scratch"
}

if [ ! -f "$folder/bible.data" ]; then
    if [ -f /usr/lib/bible.data ]; then
        cp /usr/lib/bible.data "$folder/bible.data"
    else
        fetch_text
    fi
fi

if ! python3 -c 'import tokenizers' 2> /dev/null && [ ! -x "$folder/venv/bin/python3" ]; then
    python3 -m venv "$folder/venv.part" > "$folder/venv.log" 2>&1 ||
        { cat "$folder/venv.log" >&2; fail "cannot make a virtual environment; install" \
          "python3-venv, or the Python package tokenizers"; }
    rm -rf "$folder/venv"
    "$folder/venv.part/bin/python3" -m pip install --quiet tokenizers jinja2 \
        >> "$folder/venv.log" 2>&1 ||
        { cat "$folder/venv.log" >&2; fail "cannot install the Python package tokenizers"; }
    mv "$folder/venv.part" "$folder/venv"
fi
