#!/usr/bin/env python3
"""The built command against what transformers and torch computed (tests/golden); prints TAP.

    test_golden.py PATH-OF-STOKER [CASE...]

Every case runs in fp32 with both spellings of its configuration, on the host device in place and
on the discrete one with everything on NVMe, and with bf16 activations. STK_SOAK=1 adds the
combinations that repeat what others cover.
"""

import math
import os
import sys
from functools import partial

from golden_tools import (F32, SOAK, Case, Refused, Skip, Stoker, cases, largest_difference,
                          on_nvme, read_folder, read_json, run_tests)

LOGITS_TOL, LOSS_TOL, GRAD_TOL = 1e-3, 1e-4, 0.01  # absolute, absolute, of the largest element
LOSSES_TOL, NORMS_TOL = 0.005, 0.01  # relative, at each of 50 steps
BF16_TIMES = 1.25  # of torch's own bf16 error
SPELLINGS = ("config.json", "config.other.json")


def check_forward(stoker, case, config, nvme, place):
    model = case.model(config, place)
    logits, loss = stoker.eval(case, model, place, *F32, *(on_nvme(place, False) if nvme else []))
    want = case.numbers["logits"]
    assert logits.dtype == "F32" and logits.shape == want.shape, (logits.dtype, logits.shape)
    apart = largest_difference(logits.floats(), want.floats())
    loss_apart = abs(loss - case.numbers["loss"].scalar())
    assert apart <= LOGITS_TOL, "logits differ by %.3g" % apart
    assert loss_apart <= LOSS_TOL, "loss %.8g differs by %.3g" % (loss, loss_apart)
    return "logits %.1e, loss %.1e" % (apart, loss_apart)


def gradient_errors(case, grads):
    """Name -> largest error, relative to the tensor's largest element."""
    assert set(grads) == set(case.grads()), set(grads) ^ set(case.grads())
    errors = {}
    for name, got in grads.items():
        want, largest = case.grad_of(name)
        assert got.dtype == "F32" and got.shape == case.numbers["grad." + name].shape, name
        errors[name] = largest_difference(got.floats(), want) / largest
    return errors


def check_gradients(stoker, case, config, nvme, place):
    model = case.model(config, place)
    grads, line = stoker.gradients(case, model, place, "--micro-batch", case.windows, *F32,
                                   *(on_nvme(place, True) if nvme else []))
    errors = gradient_errors(case, grads)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= GRAD_TOL, "gradient of %s off by %.3g" % (worst, errors[worst])
    loss_apart = abs(line["loss"] - case.numbers["loss"].scalar())
    assert loss_apart <= LOSS_TOL, "loss differs by %.3g" % loss_apart
    return "gradients %.1e (%s)" % (errors[worst], worst)


def worst_relative(got, want):
    assert len(got) == len(want), "%d steps" % len(got)
    assert all(map(math.isfinite, got)), "not all finite"
    return max(abs(x - y) / abs(y) for x, y in zip(got, want))


def check_training(stoker, case, config, nvme, place):
    model = case.model(config, place)
    lines, out = stoker.train(case, model, place, case.about["steps"], "--micro-batch",
                              case.windows if not nvme else 1, *F32,
                              *(on_nvme(place, True) if nvme else []))
    assert not any(line["skipped"] for line in lines), "a step was skipped"
    losses, norms = [x["loss"] for x in lines], [x["grad_norm"] for x in lines]
    apart = {}
    for what, got, limit in (("losses", losses, LOSSES_TOL), ("grad_norms", norms, NORMS_TOL)):
        for suffix in ("_bf16_grads", ""):
            apart[what + suffix] = worst_relative(
                got, case.numbers["train_" + what + suffix].floats())
            assert apart[what + suffix] <= limit, "%s%s differ by %.3g" % (what, suffix,
                                                                           apart[what + suffix])
    check_export(stoker, case, model, out, place)
    return ", ".join("%s %.1e" % item for item in apart.items())


def same_folder(model, out):
    """Names, dtypes, shapes, configuration and generation file of `out` are those of `model`."""
    was, now = read_folder(model), read_folder(out)
    assert set(was) == set(now), "tensors differ: %s" % (set(was) ^ set(now))
    for name, tensor in was.items():
        assert (tensor.dtype, tensor.shape) == (now[name].dtype, now[name].shape), name
    for name in ("config.json", "generation_config.json"):
        assert read_json(os.path.join(model, name)) == read_json(os.path.join(out, name)), name
    return was, now


def check_export(stoker, case, model, out, place):
    """A trained folder reads again: it has another loss than the model, and trains on as well."""
    was, now = same_folder(model, out)
    assert any(was[name].raw != now[name].raw for name in was), "training changed no weight"
    _, loss = stoker.eval(case, out, place, *F32)
    limit = case.numbers["train_losses"].floats()[-1] * 1.05
    assert loss <= limit, "the exported model's loss is %.6g, above %.6g" % (loss, limit)


def check_untouched(stoker, case, config, place):
    """A rate of 0 changes nothing: the folder written is the folder read, to the bit."""
    model = case.model(config, place)
    about = dict(case.about, lr=0)
    still = Case(case.name)
    still.about = about
    _, out = stoker.train(still, model, place, 1, *F32, "--micro-batch", 1)
    was, now = same_folder(model, out)
    for name, tensor in was.items():
        assert tensor.raw == now[name].raw, "%s changed with a rate of 0" % name
    here, loss_here = stoker.eval(case, model, place, *F32)
    there, loss_there = stoker.eval(case, out, place, *F32)
    assert here.raw == there.raw and loss_here == loss_there, "the folder written computes otherwise"


def check_bf16(stoker, case, matmul, place):
    options = ["--activation-dtype", "bf16", "--matmul", matmul]
    try:
        logits, _ = stoker.eval(case, case.folder, place, *options)
    except Refused as refused:
        if matmul == "bf16" and "bf16" in str(refused):
            raise Skip("no bf16 products here") from None
        raise
    torch = case.numbers["bf16_logits_err"].scalar()
    ratio = largest_difference(logits.floats(), case.numbers["logits"].floats()) / torch
    assert ratio <= BF16_TIMES, "logits %.2f times as far from fp32 as torch's" % ratio
    grads, _ = stoker.gradients(case, case.folder, place, "--micro-batch", case.windows, *options)
    errors = gradient_errors(case, grads)
    torchs = {name: case.numbers["bf16_grad_err." + name].scalar() for name in errors}
    ratios = {name: errors[name] / torchs[name] for name in errors}
    worst = max(ratios, key=ratios.get)
    together = math.sqrt(sum(e * e for e in errors.values()) / sum(e * e for e in torchs.values()))
    over = sum(r > BF16_TIMES for r in ratios.values())
    note = "logits %.2f, gradients together %.2f, worst %.2f (%s), %d of %d over %.2f times torch's" % (
        ratio, together, ratios[worst], worst, over, len(ratios), BF16_TIMES)
    assert together <= BF16_TIMES, note
    assert ratios[worst] <= BF16_TENSOR_TIMES, note
    return note


# One element of one tensor, rounded at random: see check_bf16.
BF16_TENSOR_TIMES = 3


def tests_of(stoker, name):
    case, tests = Case(name), []
    add = lambda title, check, *args: tests.append(
        ("%s %s" % (name, title), partial(check, stoker, case, *args)))
    for config in SPELLINGS:
        for nvme in (False, True):
            where = "%s %s" % (config, "nvme" if nvme else "in place")
            add("forward " + where, check_forward, config, nvme)
            if SOAK or nvme == (config != "config.json"):
                add("gradients " + where, check_gradients, config, nvme)
                add("50 steps " + where, check_training, config, nvme)
        add("written as read " + config, check_untouched, config)
    for matmul in ("f32", "bf16"):
        add("bf16 activations, %s products" % matmul, check_bf16, matmul)
    return tests


def main():
    stoker = Stoker(os.path.abspath(sys.argv[1]))
    names = sys.argv[2:] or cases()
    return run_tests([t for name in names for t in tests_of(stoker, name)], 60)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main())
