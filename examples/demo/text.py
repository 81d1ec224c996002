#!/usr/bin/env python3
"""The demo's text: the King James Bible out of Debian's package bible-kjv-text.

    text.py --out TEXT.jsonl|TEXT.txt [--data /usr/lib/bible.data] [--seed 0]

Why this text: 4.3 MB of plain English in a 2.4 MB package of Debian's main section, the words in
the public domain by age, the package's files under its authors' free licences.  Nothing of it is
stored in this repository.

The file: a text header to byte 80; then 32-bit big-endian numbers: a version, the size of a block
before compression, the number of blocks, the offset of each block and of the end.  A block is what
Unix `compress` makes, without its three-byte header, which gzip wants back.  Inside are lines
"Ge1:1 In the beginning ...".

Chapters are documents.  They are put in an order drawn from the seed, so that text held out from
the end is of the same kind as the rest.  .jsonl: one {"text"} a chapter; otherwise one plain text
with a blank line between chapters.
"""

import argparse
import json
import random
import re
import struct
import subprocess
import sys

TABLE_OFFSET = 80
COMPRESS_HEADER = b"\x1f\x9d\x90"  # magic number; 16-bit codes at most, block mode
VERSE = re.compile(r"^([1-3]?[A-Za-z]+\d+):(\d+) (.*)$")


def blocks(data):
    if not data.startswith(b"EC02Compressed Data File"):
        raise ValueError("it does not begin like a bible.data file")
    _, block_bytes, count = struct.unpack_from(">3I", data, TABLE_OFFSET)
    if not 0 < count < 1000:
        raise ValueError("it claims %d blocks" % count)
    offsets = struct.unpack_from(">%dI" % (count + 1), data, TABLE_OFFSET + 12)
    for start, stop in zip(offsets, offsets[1:]):
        done = subprocess.run(["gzip", "-dc"], input=COMPRESS_HEADER + data[start:stop],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode != 0 or len(done.stdout) > block_bytes:
            raise ValueError("gzip cannot unpack the block at byte %d" % start)
        yield done.stdout


def chapters(text):
    """Chapter texts in order, one verse a line."""
    found, name = [], None
    for line in text.splitlines():
        verse = VERSE.match(line)
        if verse is None:
            continue  # the title line
        if verse.group(1) != name:
            name = verse.group(1)
            found.append([])
        found[-1].append(verse.group(3).strip())
    return ["\n".join(verses) + "\n" for verses in found]


def main():
    p = argparse.ArgumentParser(description="Writes the demo's text.")
    p.add_argument("--out", required=True)
    p.add_argument("--data", default="/usr/lib/bible.data")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    try:
        with open(args.data, "rb") as source:
            data = source.read()
    except OSError as error:
        sys.exit("text.py: cannot read '%s': %s; install the Debian package bible-kjv-text"
                 % (args.data, error.strerror))
    try:
        texts = chapters(b"".join(blocks(data)).decode("latin-1"))
    except (ValueError, struct.error) as error:
        sys.exit("text.py: '%s' is not what was expected: %s" % (args.data, error))
    random.Random(args.seed).shuffle(texts)
    with open(args.out, "w", encoding="utf-8") as out:
        if args.out.endswith(".jsonl"):
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        else:
            out.write("\n".join(texts))
    print("%s: %d chapters, %.2f MB of text" % (args.out, len(texts), sum(map(len, texts)) / 1e6))


if __name__ == "__main__":
    main()
