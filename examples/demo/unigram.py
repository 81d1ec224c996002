#!/usr/bin/env python3
"""How well a model without context does: the bar that the demo's training has to clear.

    unigram.py TRAIN.safetensors HELDOUT.safetensors

Counts the training tokens, adds one to each count (so that no held-out token is impossible) and
prints {"unigram_cross_entropy": x, ...}: the mean of -ln p(token) in nats over the held-out tokens.
Only targets are counted on either side: tokens with loss_mask 1 that do not begin a document.
"""

import array
import json
import math
import sys

CODES = {"U8": "B", "U16": "H", "I16": "h", "I32": "i", "U32": "I", "I64": "q", "U64": "Q",
         "F32": "f"}


def read_tensors(path, names=("input_ids", "loss_mask", "document_offsets")):
    """({name: values} of those that are there, the file's metadata)."""
    with open(path, "rb") as source:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        base, tensors = source.tell(), {}
        for name, about in header.items():
            if name not in names:
                continue
            start, stop = about["data_offsets"]
            source.seek(base + start)
            values = array.array(CODES[about["dtype"]])
            values.frombytes(source.read(stop - start))
            if sys.byteorder == "big":
                values.byteswap()
            tensors[name] = values
    return tensors, header.get("__metadata__", {})


def targets(path):
    tensors, metadata = read_tensors(path)
    ids = tensors["input_ids"]
    mask = tensors.get("loss_mask") or array.array("B", b"\1" * len(ids))
    first = set(tensors.get("document_offsets", [0]))
    chosen = [ids[i] for i in range(len(ids)) if mask[i] and i not in first]
    return chosen, int(metadata.get("vocabulary_size", 0)) or max(ids) + 1


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: unigram.py TRAIN.safetensors HELDOUT.safetensors")
    train, vocabulary = targets(sys.argv[1])
    heldout, other = targets(sys.argv[2])
    counts = [1] * max(vocabulary, other)
    for token in train:
        counts[token] += 1
    total = sum(counts)
    surprise = [math.log(total) - math.log(count) for count in counts]
    result = math.fsum(surprise[token] for token in heldout) / len(heldout)
    print(json.dumps({"unigram_cross_entropy": result, "train_targets": len(train),
                      "heldout_targets": len(heldout), "vocabulary": len(counts)}))


if __name__ == "__main__":
    main()
