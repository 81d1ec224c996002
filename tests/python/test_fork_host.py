#!/usr/bin/env python3
"""NVM-35: a Python program that embeds the engine and forks data loaders after it was opened, before and between steps.  The
children are refused whatever they ask of the engine; the parent trains on with the losses of a run without children.

    test_fork_host.py LIBRARY        fork_host.c as a shared library

Prints TAP; standard library only."""

import ctypes
import math
import multiprocessing
import os
import random
import sys
import tempfile
import traceback

BATCH, STEPS, LOADERS = 128, 24, 3


def batch(step):
    """Two spirals: (coordinates, labels) of one step, the same wherever it is drawn."""
    numbers, x, labels = random.Random(step), [], []
    for i in range(BATCH):
        r = 0.1 + 0.9 * numbers.random()
        a = 7 * r + math.pi * (i % 2)
        x += [r * math.cos(a), r * math.sin(a)]
        labels.append(i % 2)
    return x, labels


class Host:
    def __init__(self, library, folder):
        self.lib = ctypes.CDLL(library)
        self.lib.host_error.restype = ctypes.c_char_p
        self.lib.host_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p]
        self.ok(self.lib.host_open(folder.encode()))

    def ok(self, status):
        assert status == 0, (status, self.lib.host_error())

    def step(self, x, labels):
        loss = ctypes.c_double()
        self.ok(self.lib.host_step((ctypes.c_float * (2 * BATCH))(*x), (ctypes.c_int * BATCH)(*labels), 1e-2, ctypes.byref(loss)))
        return loss.value

    def parameter(self):
        value = ctypes.c_double()
        self.ok(self.lib.host_parameter(ctypes.byref(value)))
        return value.value


def loader(host, which, steps, pipe):
    """A child: its part of the batches in order, then what it may do to the engine: nothing."""
    for step in steps[which::LOADERS]:
        pipe.send(batch(step))
    pipe.send(host.lib.host_child())
    pipe.close()


def loaders(host, steps):
    """Batches of `steps` from forked children; at the end the children have asked and were refused."""
    fork = multiprocessing.get_context("fork")
    children, pipes = [], []
    for which in range(LOADERS):
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=loader, args=(host, which, steps, theirs))
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(ours)
    for i, _ in enumerate(steps):
        yield pipes[i % LOADERS].recv()
    wrong = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join(60)
    assert wrong == [0] * LOADERS, "calls that a child was not refused: %s" % wrong
    assert [child.exitcode for child in children] == [0] * LOADERS, children


def run(library, forked):
    with tempfile.TemporaryDirectory(prefix="stoker-fork-", dir=os.environ.get("STOKER_TEST_DIR")) as folder:
        host = Host(library, folder)
        losses = []
        for epoch in range(2):  # new children in each, as a data loader makes them
            steps = list(range(epoch * STEPS // 2, (epoch + 1) * STEPS // 2))
            for x, labels in loaders(host, steps) if forked else map(batch, steps):
                losses.append(host.step(x, labels))
        value = host.parameter()
        host.lib.host_close()
        assert os.listdir(folder) == [], "a store was left"
    return losses, value


def test_nvm_35_forked_data_loaders(library):
    alone, with_children = run(library, False), run(library, True)
    assert len(alone[0]) == STEPS and alone[0][-1] < alone[0][0], alone
    assert alone == with_children, (alone, with_children)
    print("# loss %.4f to %.4f" % (alone[0][0], alone[0][-1]))


def main():
    try:
        test_nvm_35_forked_data_loaders(sys.argv[1])
        print("ok 1 - nvm_35_forked_data_loaders\n1..1")
        return 0
    except Exception:
        print("".join("# %s\n" % line for line in traceback.format_exc().splitlines()[-20:]))
        print("not ok 1 - nvm_35_forked_data_loaders\n1..1")
        return 1


if __name__ == "__main__":
    sys.exit(main())
