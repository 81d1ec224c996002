#!/usr/bin/env python3
"""Compares two files of logits: same_logits.py EXPECTED.safetensors GOT.safetensors [TOLERANCE]

Both hold a tensor `logits` of F32.  Exit code 0 when no element differs by more than the tolerance
(default 0.001), 1 otherwise.
"""

import math
import sys

from unigram import read_tensors


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: same_logits.py EXPECTED.safetensors GOT.safetensors [TOLERANCE]")
    limit = float(sys.argv[3]) if len(sys.argv) == 4 else 1e-3
    expected, got = (read_tensors(p, ["logits"])[0]["logits"] for p in sys.argv[1:3])
    if len(expected) != len(got):
        sys.exit("same_logits: %d logits expected, %d there" % (len(expected), len(got)))
    if not all(map(math.isfinite, got)):
        sys.exit("same_logits: some logits are not finite numbers")
    worst = max(abs(a - b) for a, b in zip(expected, got))
    if worst > limit:
        sys.exit("same_logits: the largest difference is %.3g, more than %g" % (worst, limit))
    print("%d logits agree within %.2g (limit %g)" % (len(got), worst, limit))


if __name__ == "__main__":
    main()
