"""Compare a stoker run with transformers, live: slower than the golden files, for any model.

    compare_live.py export DIR DATA LOGITS.safetensors [--seq N] [--tol 1e-3] [--windows N]
        Loads the Hugging Face folder DIR in transformers (fp32 arithmetic), runs the first windows
        of DATA and compares with `logits` (windows, seq, vocabulary; or windows * seq, vocabulary
        with --seq) that `stoker eval --model DIR --data DATA --logits F` wrote. Needs no stoker.

    compare_live.py eval --stoker build/stoker DIR DATA [--seq N] [--tol 1e-3] [--loss-tol 1e-4]
        Runs `stoker eval --logits F --json F` itself, then compares the logits of all windows and
        the mean loss.

    compare_live.py gradients DIR DATA GRADIENTS [--seq N] [--windows N] [--tol 0.01]
        GRADIENTS is the file or folder that `stoker train --steps 1 --dump-gradients` wrote.
        It holds one tensor per parameter under its Hugging Face name (a prefix `grad.` is taken
        off). Compares each with torch's for the mean loss of the first N windows together, as one
        step over all of them; the error is relative to the tensor's largest element.

DATA is a token file of `stoker prepare` or a plain .bin of uint16. Exit code 0: equal within the
tolerance; 1: not, with a sentence that says where; 2: bad use; 77: torch or transformers is not
installed here (as tests skip).
"""

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    import transformers
    from safetensors import safe_open
except ImportError as missing:
    print(f"compare_live: skipped, {missing}")
    sys.exit(77)

import reference as ref


class Difference(Exception):
    """Two results differ, or one of them is not what it should be: exit code 1."""


def read_tensor(path, name):
    with safe_open(path, framework="pt") as f:
        if name not in f.keys():
            raise Difference(f"{path} holds no tensor '{name}' but {', '.join(sorted(f.keys()))}")
        return f.get_tensor(name)


def read_windows(path, seq, model):
    ids, mask, docs = ref.load_tokens(path)
    vocab = model.config.vocab_size
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise Difference(f"{path}: token ids {ids.min()}..{ids.max()}, vocabulary of {vocab}")
    try:
        return ref.Windows(ids, mask, docs, seq)
    except ValueError as wrong:
        raise Difference(f"{path}: {wrong}") from None


def torch_logits(model, windows):
    """Window by window, so that memory does not grow with the token file."""
    with torch.no_grad():
        for w in range(windows.count):
            part = windows.slice(w, w + 1)
            yield part, ref.forward(model, part)[0].float()


def compare_logits(model, windows, theirs, tolerance):
    """Returns the largest difference and the mean loss of torch over these windows."""
    worst, total, targets = 0.0, 0.0, 0
    where = None
    for w, (part, logits) in enumerate(torch_logits(model, windows)):
        if not bool(torch.isfinite(theirs[w]).all()):
            raise Difference(f"window {w}: logits that are not finite numbers")
        apart = (theirs[w].float() - logits).abs()
        if apart.max().item() > worst:
            worst = apart.max().item()
            at = divmod(int(apart.argmax()), apart.shape[1])
            where = (w, *at, theirs[w][at].item(), logits[at].item())
        count = int(part.targets.sum())
        if count:
            total += ref.mean_loss(logits[None], part).item() * count
            targets += count
    if worst > tolerance:
        w, place, token, ours, torchs = where
        raise Difference(f"logits differ by {worst:.3g}, more than {tolerance:g}: window {w}, "
                         f"place {place}, token {token}: {ours:.6g} here, {torchs:.6g} in torch")
    return worst, total / targets if targets else None


def shaped_logits(path, seq, vocab):
    logits = read_tensor(path, "logits")
    if logits.dim() == 2:
        if seq is None:
            raise Difference(f"{path}: 'logits' has shape {tuple(logits.shape)}: --seq is needed")
        logits = logits[: len(logits) // seq * seq].reshape(-1, seq, logits.shape[1])
    if logits.dim() != 3 or logits.shape[2] != vocab or seq not in (None, logits.shape[1]):
        raise Difference(f"{path}: 'logits' has shape {tuple(logits.shape)}, expected "
                         f"(windows, {seq or 'seq'}, {vocab})")
    return logits


def run_export(args):
    model = ref.load_model(args.dir)
    theirs = shaped_logits(args.logits, args.seq, model.config.vocab_size)
    windows = read_windows(args.data, theirs.shape[1], model)
    count = min(windows.count, theirs.shape[0], args.windows)
    if count == 0:
        raise Difference(f"{args.logits}: no windows to compare")
    worst, _ = compare_logits(model, windows.slice(0, count), theirs, args.tol)
    print(f"compare_live: {args.dir} loads in transformers {transformers.__version__}; logits of "
          f"{count} windows of {windows.seq} tokens agree within {worst:.2g} (limit {args.tol:g})")


def find_loss(path):
    with open(path, encoding="utf-8") as f:
        result = json.load(f)
    for key in ("loss", "mean_loss", "eval_loss"):
        if key in result:
            return float(result[key])
    raise Difference(f"{path}: no 'loss' among {', '.join(result)}")


def run_eval(args):
    model = ref.load_model(args.dir)
    with tempfile.TemporaryDirectory() as scratch:
        logits_file = os.path.join(scratch, "logits.safetensors")
        json_file = os.path.join(scratch, "eval.json")
        command = [args.stoker, "eval", "--model", args.dir, "--data", args.data,
                   "--logits", logits_file, "--json", json_file]
        command += ["--seq", str(args.seq)] if args.seq else []
        done = subprocess.run(command + args.more, capture_output=True, text=True)
        if done.returncode != 0:
            raise Difference(f"{' '.join(command)} ended with {done.returncode}: "
                             f"{done.stderr.strip() or done.stdout.strip()}")
        theirs = shaped_logits(logits_file, args.seq, model.config.vocab_size)
        loss = find_loss(json_file)
    windows = read_windows(args.data, theirs.shape[1], model)
    if theirs.shape[0] != windows.count:
        raise Difference(f"stoker gave logits of {theirs.shape[0]} windows, the data has "
                         f"{windows.count}")
    worst, expected = compare_logits(model, windows, theirs, args.tol)
    if expected is None:
        raise Difference(f"{args.data}: no targets, so no loss to compare")
    if not abs(loss - expected) <= args.loss_tol:
        raise Difference(f"mean loss {loss:.8g} here, {expected:.8g} in torch")
    print(f"compare_live: {windows.count} windows of {windows.seq} tokens: logits agree within "
          f"{worst:.2g} (limit {args.tol:g}), loss {loss:.6f} within {abs(loss - expected):.2g}")


def run_gradients(args):
    model = ref.load_model(args.dir)
    windows = read_windows(args.data, args.seq or 512, model)
    windows = windows.slice(0, min(windows.count, args.windows))
    _, _, grads = ref.logits_and_gradients(model, windows)
    files = [args.gradients]
    if os.path.isdir(args.gradients):
        files = sorted(glob.glob(os.path.join(args.gradients, "**", "*.safetensors"),
                                 recursive=True))
    theirs = {}
    for path in files:
        with safe_open(path, framework="pt") as f:
            theirs.update({n.removeprefix("grad."): f.get_tensor(n) for n in f.keys()})
    missing = sorted(set(grads) - set(theirs))
    if missing:
        raise Difference(f"{args.gradients} lacks {len(missing)} gradients: {missing[0]} ...")
    worst, worst_name = 0.0, None
    for name, grad in grads.items():
        if theirs[name].shape != grad.shape:
            raise Difference(f"{name}: shape {tuple(theirs[name].shape)}, {tuple(grad.shape)}")
        error = ((theirs[name].float() - grad).abs().max() / grad.abs().max()).item()
        if not error <= args.tol:
            raise Difference(f"{name}: differs by {error:.3g} of its largest element, more than "
                             f"{args.tol:g}")
        if error >= worst:
            worst, worst_name = error, name
    print(f"compare_live: {len(grads)} gradients agree within {worst:.2g} of their largest "
          f"element (limit {args.tol:g}; worst: {worst_name})")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    export = commands.add_parser("export")
    evaluate = commands.add_parser("eval")
    gradients = commands.add_parser("gradients")
    for command in (export, evaluate, gradients):
        command.add_argument("dir")
        command.add_argument("data")
        command.add_argument("--seq", type=int)
        command.add_argument("--tol", type=float, default=1e-3)
    export.add_argument("logits")
    export.add_argument("--windows", type=int, default=16, help="at most so many")
    evaluate.add_argument("--stoker", default=os.path.join("build", "stoker"))
    evaluate.add_argument("--loss-tol", type=float, default=1e-4)
    evaluate.add_argument("more", nargs="*", help="after --: options handed to stoker eval")
    gradients.add_argument("gradients")
    gradients.add_argument("--windows", type=int, default=1 << 30)
    gradients.set_defaults(tol=0.01)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        {"export": run_export, "eval": run_eval, "gradients": run_gradients}[args.what](args)
    except (Difference, OSError, ValueError) as wrong:
        print(f"compare_live: {wrong}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
