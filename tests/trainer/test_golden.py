#!/usr/bin/env python3
"""The built command against what transformers and torch computed (tests/golden); prints TAP.

    test_golden.py PATH-OF-STOKER [CASE...]

Every case runs in fp32 with both spellings of its configuration, on the host device in place and
on the discrete one with everything on NVMe, and with bf16 activations. STK_SOAK=1 adds the
combinations that repeat what others cover; STK_BRIEF=1 (`./dev test`, after the first part) takes one
model of each family through all of it, the others through a pass and its gradients.
"""

import math
import os
import sys
from functools import partial

from golden_tools import (F32, SOAK, Case, Refused, Skip, Stoker, cases, largest_difference,
                          on_nvme, read_folder, read_json, run_tests)

LOGITS_TOL, LOSS_TOL, GRAD_TOL = 1e-3, 1e-4, 0.01  # absolute, absolute, of the largest element
# Relative, at each of 50 steps. stoker's gradients are bf16, so the norms are those of torch's run
# with bf16 gradients; the two golden runs differ by up to 1 % in theirs.
TRAIN_TOLS = {"losses_bf16_grads": 0.005, "losses": 0.005, "grad_norms_bf16_grads": 0.01,
              "grad_norms": 0.02}
BF16_TIMES = 1.25  # of torch's own bf16 error
# bf16 activations, by the products: (most of one tensor, share of tensors that may be above
# BF16_TIMES, geometric mean). With f32 products every tensor of every case keeps the limit
# (measured: worst 1.05, mean 0.47). With bf16 products the operands of each product are rounded,
# as in torch, and two thirds of torch's error remain. The ratio of two largest errors is a draw:
# of these 280 tensors 5 lie above 1.25 (worst 2.11: there torch is twice as near as it mostly is),
# over 8 token files 1.9 % of 2240 (f32 products: 0.3 %, worst 2.5). f32 boundaries would not
# change that (emulated: 1.7 % become 1.5 %), nor would f32 everywhere but in the operands (0.4 %).
# What is true of every tensor is its mean over token files: test_golden_live.py asserts 1.25
# there, for both products.
BF16_LIMITS = {"f32": (BF16_TIMES, 0, 0.6), "bf16": (2.5, 0.04, 0.8)}
ONE_OF_EACH_FAMILY = ("llama_docs_mask_old", "mistral_window_docs_mask_new",
                      "qwen2_window_layers_new", "qwen3_tied_old")
BRIEF = os.environ.get("STK_BRIEF") == "1" and not SOAK
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
    where = [*on_nvme(place, True), "--save-final-state"] if nvme else []
    lines, out = stoker.train(case, model, place, case.about["steps"], "--micro-batch",
                              case.windows if not nvme else 1, *F32, *where)
    assert not any(line["skipped"] for line in lines), "a step was skipped"
    apart = {}
    for what, limit in TRAIN_TOLS.items():
        got = [line["loss" if what.startswith("losses") else "grad_norm"] for line in lines]
        apart[what] = worst_relative(got, case.numbers["train_" + what].floats())
        assert apart[what] <= limit, "%s differ by %.3g" % (what, apart[what])
    check_export(stoker, case, model, out, place)
    if nvme:
        check_export_command(stoker, out, place)
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


def check_export_command(stoker, out, place):
    """`stoker export` of the last checkpoint writes the folder that the run ended with."""
    (checkpoint,) = os.listdir(os.path.join(out, "checkpoints"))
    again = os.path.join(place, "exported")
    stoker.run("export", "--checkpoint", os.path.join(out, "checkpoints", checkpoint), "--out", again)
    was, now = same_folder(out, again)
    for name, tensor in was.items():
        assert tensor.raw == now[name].raw, "%s is another after `stoker export`" % name


def check_untouched(stoker, case, config, place):
    """A rate of 0 changes nothing: the folder written is the folder read, to the bit."""
    model = case.model(config, place)
    _, out = stoker.train(case, model, place, 1, *F32, "--micro-batch", 1, lr=0)
    was, now = same_folder(model, out)
    for name, tensor in was.items():
        assert tensor.raw == now[name].raw, "%s changed with a rate of 0" % name
    here, loss_here = stoker.eval(case, model, place, *F32)
    there, loss_there = stoker.eval(case, out, place, *F32)
    assert here.raw == there.raw and loss_here == loss_there, "it computes otherwise"


def check_bf16(stoker, case, matmul, seen, place):
    """`seen` collects the ratios of all tensors, by products."""
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
    seen[matmul].extend(ratios.values())
    note = "logits %.2f, gradients together %.2f, worst %.2f (%s) times torch's" % (
        ratio, together, ratios[worst], worst)
    assert together <= BF16_TIMES, note
    assert ratios[worst] <= BF16_LIMITS[matmul][0], note
    return note


def check_bf16_share(matmul, all_seen, place):
    """Few of all tensors are beyond the limit, and on the whole they are nearer than torch's."""
    seen, (_, most_over, most_mean) = all_seen[matmul], BF16_LIMITS[matmul]
    if len(seen) < 80:
        raise Skip("too few cases were run")
    over = sum(r > BF16_TIMES for r in seen) / len(seen)
    mean = math.exp(sum(map(math.log, seen)) / len(seen))
    note = "%.1f %% of %d tensors above %.2f times torch's error, geometric mean %.2f" % (
        100 * over, len(seen), BF16_TIMES, mean)
    assert over <= most_over and mean <= most_mean, note
    return note


def tests_of(stoker, name, seen):
    case, tests, brief = Case(name), [], BRIEF and name not in ONE_OF_EACH_FAMILY

    def add(title, check, *args):
        tests.append(("%s %s" % (name, title), partial(check, stoker, case, *args)))

    for config in SPELLINGS:
        for nvme in (False, True):
            where = "%s %s" % (config, "nvme" if nvme else "in place")
            if not brief or nvme == (config != "config.json"):
                add("forward " + where, check_forward, config, nvme)
            if SOAK or nvme == (config != "config.json"):
                add("gradients " + where, check_gradients, config, nvme)
                if not brief:
                    add("50 steps " + where, check_training, config, nvme)
        if (SOAK or config == "config.json") and not brief:
            add("written as read " + config, check_untouched, config)
    for matmul in ("f32", "bf16"):
        if SOAK or (matmul == "f32" and not brief) or name in ONE_OF_EACH_FAMILY:
            add("bf16 activations, %s products" % matmul, check_bf16, matmul, seen)
    return tests


def main():
    stoker, seen = Stoker(os.path.abspath(sys.argv[1])), {matmul: [] for matmul in BF16_LIMITS}
    tests = [t for name in sys.argv[2:] or cases() for t in tests_of(stoker, name, seen)]
    return run_tests(tests, [("bf16 gradients of all cases, %s products" % matmul,
                              partial(check_bf16_share, matmul, seen)) for matmul in BF16_LIMITS])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main())
