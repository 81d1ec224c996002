#!/usr/bin/env python3
"""The built command against transformers and torch themselves; prints TAP, skips without them.

    test_golden_live.py PATH-OF-STOKER

STOKER_PEERS_PYTHON may name a python3 that has torch, transformers, safetensors and numpy; else
the running one is asked. This file starts itself again under that one.
"""

import json
import os
import subprocess
import sys
from functools import partial

from golden_tools import (F32, GOLDEN, ROOT, SOAK, Case, Refused, Skip, Stoker, cases,
                          run_tests)

COMPARE = os.path.join(GOLDEN, "compare_live.py")
THREE = ("llama_rope3_tied_new", "mistral_window_docs_mask_new", "qwen3_untied_sharded_new")
DEMO = os.path.join(ROOT, "examples", "demo", "config.json")
BF16_TIMES, BF16_DRAWS = 1.25, 16 if SOAK else 6


def compare(*args):
    """compare_live.py's sentence; its exit code must be 0."""
    done = subprocess.run([sys.executable, COMPARE, *map(str, args)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0, done.stderr.strip() or done.stdout.strip()
    return done.stdout.strip().split(": ", 1)[-1]


def check_case(stoker, name, place):
    """eval, gradients and the folder after ten steps, for one golden case."""
    case = Case(name)
    seq = case.about["seq"]
    notes = [compare("eval", "--stoker", stoker.path, case.folder, case.data, "--seq", seq)]
    dump = os.path.join(place, "gradients")
    stoker.train(case, case.folder, place, 1, "--micro-batch", 1, "--dump-gradients", dump, *F32)
    notes.append(compare("gradients", case.folder, case.data, dump, "--seq", seq))
    _, out = stoker.train(case, case.folder, place, 10, "--micro-batch", 1, *F32)
    stoker.eval(case, out, place, *F32)
    notes.append(compare("export", out, case.data, os.path.join(place, "logits.safetensors")))
    return "; ".join(notes)


def random_tokens(path, count, vocab, seed):
    import numpy
    ids = numpy.random.default_rng(seed).integers(0, vocab, count).astype("<u2")
    ids.tofile(path)
    return path


def train_tokenizer(place, vocab):
    """A tokenizer folder as `stoker prepare --train-tokenizer` makes it."""
    text, folder = os.path.join(place, "text.txt"), os.path.join(place, "tokenizer")
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f, open(text, "w") as out:
        out.write(f.read())
    subprocess.run([sys.executable, "-m", "stoker", "prepare", text, "--train-tokenizer", str(vocab),
                    "--out-tokenizer", folder, "--out", os.path.join(place, "t.safetensors")],
                   check=True, env=dict(os.environ, PYTHONPATH=os.path.join(ROOT, "python")),
                   stdout=subprocess.DEVNULL)
    return folder


def check_demo_model(stoker, place):
    """The demo's model with the weights of `stoker init`: a step and its gradients, its export."""
    import transformers
    model, out = os.path.join(place, "model"), os.path.join(place, "out")
    dump, logits = os.path.join(place, "gradients"), os.path.join(place, "logits.safetensors")
    with open(DEMO, encoding="utf-8") as f:
        vocab = json.load(f)["vocab_size"]
    tokens = random_tokens(os.path.join(place, "data.bin"), 4 * 128 + 9, vocab, 1)
    stoker.run("init", "--config", DEMO, "--seed", 1, "--out", model)
    tokenizer = train_tokenizer(place, vocab)
    for name in os.listdir(tokenizer):
        os.rename(os.path.join(tokenizer, name), os.path.join(model, name))
    notes = [compare("eval", "--stoker", stoker.path, model, tokens, "--seq", 128)]
    stoker.run("train", "--model", model, "--data", tokens, "--seq", 128, "--batch", 4, "--steps", 1,
               "--lr", "1e-3", "--dump-gradients", dump, "--out", out, "--progress", "none", *F32)
    notes.append(compare("gradients", model, tokens, dump, "--seq", 128))
    stoker.run("eval", "--model", out, "--data", tokens, "--seq", 128, "--logits", logits, *F32)
    notes.append(compare("export", out, tokens, logits))
    text = "The state of the optimizer lies on disk."
    was = transformers.AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    now = transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"]
    assert was == now and max(now) < vocab, (was, now)
    return "; ".join(notes + ["AutoTokenizer gives %d tokens" % len(now)])


def bf16_ratios(stoker, name, matmul, place):
    """Tensor -> mean over token files of our bf16 gradient's largest error over torch's mean."""
    import numpy
    import reference as ref
    import torch
    from safetensors.numpy import load_file, save_file
    case = Case(name)
    tensors = load_file(case.data)
    exact = ref.load_model(case.folder)
    torchs = ref.load_model(case.folder, torch.bfloat16)
    ours, theirs = {}, {}
    case.data = os.path.join(place, "data.safetensors")
    shape, dtype = tensors["input_ids"].shape, tensors["input_ids"].dtype
    for draw in range(BF16_DRAWS):
        random = numpy.random.default_rng(draw)
        tensors["input_ids"] = random.integers(0, case.about["vocab_size"], shape).astype(dtype)
        save_file(tensors, case.data)
        windows = ref.Windows(*ref.load_tokens(case.data), case.about["seq"])
        _, _, want = ref.logits_and_gradients(exact, windows)
        _, _, bf16 = ref.logits_and_gradients(torchs, windows)
        got, _ = stoker.gradients(case, case.folder, place, "--micro-batch", case.windows,
                                  "--activation-dtype", "bf16", "--matmul", matmul)
        for tensor, grad in want.items():
            mine = torch.tensor(got[tensor].floats()).reshape(grad.shape)
            scale = grad.abs().max()
            ours[tensor] = ours.get(tensor, 0) + ((mine - grad).abs().max() / scale).item()
            theirs[tensor] = theirs.get(tensor, 0) + ((bf16[tensor] - grad).abs().max() / scale).item()
    return {tensor: ours[tensor] / theirs[tensor] for tensor in ours}


def check_bf16(stoker, name, matmul, place):
    """No tensor's gradient is more than 1.25 times as far from fp32 as torch's, on average over
    token files: one file's ratio of two largest errors is chance (see test_golden.py)."""
    try:
        ratios = bf16_ratios(stoker, name, matmul, place)
    except Refused as refused:
        if matmul == "bf16" and "bf16" in str(refused):
            raise Skip("no bf16 products here") from None
        raise
    worst = max(ratios, key=ratios.get)
    note = "mean of %d token files: worst tensor %.2f times torch's error (%s), %d tensors" % (
        BF16_DRAWS, ratios[worst], worst, len(ratios))
    assert ratios[worst] <= BF16_TIMES, note
    return note


def tests(stoker):
    found = [(name + " live", partial(check_case, stoker, name)) for name in THREE]
    found.append(("demo model live", partial(check_demo_model, stoker)))
    for name in cases() if SOAK else THREE:
        for matmul in ("f32", "bf16"):
            found.append(("%s bf16 gradients, %s products, many token files" % (name, matmul),
                          partial(check_bf16, stoker, name, matmul)))
    return found


def skip_all(why):
    print("1..0 # SKIP " + why)
    return 0


def main():
    peers = os.environ.pop("STOKER_PEERS_PYTHON", "")
    if peers:
        return subprocess.call([peers, os.path.abspath(__file__), sys.argv[1]])
    try:
        import torch
        import transformers
        import safetensors  # noqa: F401
    except ImportError as missing:
        return skip_all("%s (STOKER_PEERS_PYTHON may name a python3 that has it)" % missing)
    sys.path.insert(0, GOLDEN)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return run_tests(tests(Stoker(os.path.abspath(sys.argv[1]))))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main())
