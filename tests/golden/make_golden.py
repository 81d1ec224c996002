"""Write the golden folders tests/golden/<case>/ from transformers and torch.

    python make_golden.py                  all cases, into the folder of this script
    python make_golden.py CASE... --out D  some cases, somewhere else

Needs torch (made with 2.15.0, CPU), transformers (5.24.0), safetensors (0.8.0), numpy (2.x). The
same versions on the same kind of processor give the same bytes; on another processor the last bits
of the numbers move. README.md says what the files hold and what each case is for; reference.py
holds the arithmetic and the meaning of windows, documents and targets.

Before a case is written it is checked against what it claims: both config spellings give the same
logits, documents run one by one give the same logits, transformers' own loss agrees, the feature
under test changes the logits when it is taken away, and a training run that differs only by
rounding stays close. A case that fails a check stops the script.
"""

import argparse
import json
import os
import shutil
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import safetensors
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import reference as ref

HERE = os.path.dirname(os.path.abspath(__file__))
TRAINING = {"steps": 50, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01,
            "clip": 1.0}

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


def shape(hidden, inter, layers, heads, kv, vocab, **more):
    return dict(hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv, vocab_size=vocab, **more)


# spelling: that of config.json; config.other.json has the same model in the other one.
# features: config changes that must move the logits, so that a reader that ignores them is seen.
# old_only: keys that the old spelling's files carry and the new one drops.
CASES = {
    "llama_gqa_old": dict(
        family="llama", spelling="old", seq=17, windows=4, dtype="int64",
        config=shape(36, 43, 2, 6, 2, 61, rope_parameters=rope(10000.0), rms_norm_eps=1e-5,
                     tie_word_embeddings=False),
        features=[{"rope_parameters": rope(500.0)}, {"rms_norm_eps": 1e-1}]),
    "llama_rope3_tied_new": dict(
        family="llama", spelling="new", seq=33, windows=4, dtype="int32",
        config=shape(32, 44, 2, 2, 1, 97, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5,
                     tie_word_embeddings=True),
        features=[{"rope_parameters": rope(10000.0)}]),
    "llama_head_dim_new": dict(
        family="llama", spelling="new", seq=19, windows=4, dtype="uint16",
        config=shape(33, 40, 2, 3, 1, 67, head_dim=14, attention_bias=False, mlp_bias=False,
                     rope_parameters=rope(500000.0), rms_norm_eps=1e-6,
                     tie_word_embeddings=False),
        features=[{"rope_parameters": rope(10000.0)}]),
    "llama_docs_mask_old": dict(
        family="llama", spelling="old", seq=23, windows=4, dtype="int64", mask=True,
        documents=[0, 5, 6, 23, 40, 58, 69, 80, 91],
        config=shape(32, 46, 2, 4, 2, 61, rope_parameters=rope(10000.0), rms_norm_eps=1e-5,
                     tie_word_embeddings=False),
        features=[]),
    "llama_docs_midwindow_new": dict(
        family="llama", spelling="new", seq=21, windows=4, dtype="int32",
        documents=[0, 11, 30, 71],
        config=shape(30, 48, 2, 5, 5, 61, rope_parameters=rope(10000.0), rms_norm_eps=1e-6,
                     tie_word_embeddings=True),
        features=[]),
    "mistral_window_new": dict(
        family="mistral", spelling="new", seq=29, windows=3, dtype="uint32",
        config=shape(32, 42, 2, 4, 1, 61, sliding_window=7, rope_parameters=rope(10000.0),
                     rms_norm_eps=1e-5, tie_word_embeddings=False),
        features=[{"sliding_window": None}, {"sliding_window": 8}, {"sliding_window": 6}]),
    "mistral_window_old": dict(
        family="mistral", spelling="old", seq=31, windows=3, dtype="uint8",
        config=shape(36, 44, 2, 3, 1, 61, sliding_window=5, rope_parameters=rope(1000000.0),
                     rms_norm_eps=1e-5, tie_word_embeddings=False),
        features=[{"sliding_window": None}, {"sliding_window": 6}, {"sliding_window": 4}]),
    "mistral_window_docs_mask_new": dict(
        family="mistral", spelling="new", seq=27, windows=3, dtype="int16", mask=True,
        documents=[0, 9, 27, 44, 60],
        config=shape(32, 40, 2, 2, 2, 61, sliding_window=6, rope_parameters=rope(10000.0),
                     rms_norm_eps=1e-5, tie_word_embeddings=False),
        features=[{"sliding_window": 32}]),
    "qwen2_tied_old": dict(
        family="qwen2", spelling="old", seq=24, windows=3, dtype="uint16",
        config=shape(36, 46, 2, 3, 1, 73, rope_parameters=rope(1000000.0), rms_norm_eps=1e-6,
                     tie_word_embeddings=True, use_sliding_window=False, max_window_layers=1),
        old_only={"sliding_window": 5},
        features=[{"use_sliding_window": True, "sliding_window": 5}]),
    "qwen2_window_layers_new": dict(
        family="qwen2", spelling="new", seq=22, windows=3, dtype="int64",
        config=shape(32, 33, 3, 2, 1, 61, rope_parameters=rope(10000.0), rms_norm_eps=1e-6,
                     tie_word_embeddings=False, use_sliding_window=True, sliding_window=4,
                     max_window_layers=1),
        features=[{"layer_types": ["full_attention"] * 3},
                  {"layer_types": ["sliding_attention"] * 3}, {"sliding_window": 5}]),
    "qwen3_untied_sharded_new": dict(
        family="qwen3", spelling="new", seq=18, windows=4, dtype="int32", shard_bytes=20000,
        config=shape(39, 44, 2, 3, 1, 61, head_dim=16, rope_parameters=rope(1000000.0),
                     rms_norm_eps=1e-6, tie_word_embeddings=False),
        features=[{"rms_norm_eps": 1e-1}]),
    "qwen3_tied_old": dict(
        family="qwen3", spelling="old", seq=17, windows=3, dtype="int64",
        config=shape(32, 36, 2, 4, 2, 257, head_dim=12, rope_parameters=rope(10000.0),
                     rms_norm_eps=1e-6, tie_word_embeddings=True),
        features=[{"rms_norm_eps": 1e-1}]),
}


def check(condition, sentence):
    if not condition:
        raise SystemExit(f"make_golden: {sentence}")


def new_config(case, **changes):
    settings = dict(max_position_embeddings=128, **case["config"])
    settings.update(changes)
    return AutoConfig.for_model(case["family"], **settings)


def old_spelling(new, case):
    """The same settings as folders of 2023-2024 have them."""
    old = {k: v for k, v in new.items()
           if k not in ("dtype", "rope_parameters", "layer_types", "pad_token_id")}
    parameters = dict(new["rope_parameters"])
    old["torch_dtype"] = new["dtype"]
    old["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters["rope_type"]
    if case["family"] in ("llama", "qwen3"):  # Mistral and Qwen2 wrote no rope_scaling when none
        old["rope_scaling"] = None if kind == "default" else parameters
    else:
        check(kind == "default", "the old Mistral and Qwen2 spelling has no rope_scaling here")
    if case["family"] in ("llama", "mistral", "qwen2"):
        if old.get("head_dim") == old["hidden_size"] // old["num_attention_heads"]:
            del old["head_dim"]
    old.update(case.get("old_only", {}))
    old["transformers_version"] = "4.44.0"
    return old


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2, sort_keys=True)
        f.write("\n")


def fill_weights(model, rng):
    """Weights of the size a trained model has: logits of order 1, biases and norms that matter."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(tuple(param.shape)).astype(np.float32))
            if name.endswith("bias"):
                value = 0.3 * noise
            elif param.dim() == 1:
                value = 1.0 + 0.15 * noise
                if name == "model.norm.weight" and model.config.tie_word_embeddings:
                    value *= 2.0 * len(value) ** -0.5  # the head's share of the logits' size
            elif "embed_tokens" in name:
                value = 0.5 * noise
            else:
                value = noise * param.shape[1] ** -0.5
            param.copy_(value.to(torch.bfloat16))


def write_model(folder, case, rng):
    """config.json, config.other.json, generation_config.json, weights and index."""
    model = AutoModelForCausalLM.from_config(new_config(case), dtype=torch.float32)
    fill_weights(model, rng)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=case.get("shard_bytes", 1 << 30))
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        new = json.load(f)
    pair = {"new": new, "old": old_spelling(new, case)}
    other = "old" if case["spelling"] == "new" else "new"
    write_json(os.path.join(folder, "config.json"), pair[case["spelling"]])
    write_json(os.path.join(folder, "config.other.json"), pair[other])


def write_data(path, case, rng):
    """A stream that can be learned: each token has a favourite successor, taken 7 times in 10."""
    vocab = case["config"]["vocab_size"]
    count = case["windows"] * case["seq"] + 5  # the last 5 fill no window
    favourite = rng.permutation(vocab)
    ids = np.empty(count, dtype=np.int64)
    ids[0] = rng.integers(vocab)
    for i in range(1, count):
        ids[i] = favourite[ids[i - 1]] if rng.random() < 0.7 else rng.integers(vocab)
    ids[-6] = vocab - 1
    tensors = {"input_ids": ids.astype(case["dtype"])}
    if case.get("mask"):
        tensors["loss_mask"] = (rng.random(count) < 0.6).astype(np.uint8)
        tensors["loss_mask"][::5] = 1
    if "documents" in case:
        tensors["document_offsets"] = np.array(case["documents"], dtype=np.int64)
    save_file(tensors, path)


def check_spellings(folder, logits, windows):
    """config.other.json must load as the same model, bit for bit."""
    swapped = folder + ".swapped"
    shutil.copytree(folder, swapped)
    os.replace(os.path.join(swapped, "config.other.json"), os.path.join(swapped, "config.json"))
    with torch.no_grad():
        other = ref.forward(ref.load_model(swapped), windows)
    shutil.rmtree(swapped)
    check(torch.equal(other, logits), f"{folder}: the two config spellings differ")


def check_documents(model, windows, logits):
    """Each document of each window, run alone without a mask, must give the same logits."""
    worst = 0.0
    for w in range(windows.count):
        for number in windows.document[w].unique():
            places = (windows.document[w] == number).nonzero().flatten()
            with torch.no_grad():
                alone = model(input_ids=windows.ids[w, places][None], use_cache=False).logits[0]
            worst = max(worst, (alone - logits[w, places]).abs().max().item())
    check(worst < 2e-5, f"documents run alone differ by {worst}")
    return worst


def check_features(name, case, model, windows, logits):
    """Taking a feature away must move the logits well beyond the tolerance of the comparison."""
    smallest = None
    if windows.has_documents:
        with torch.no_grad():
            joined = model(input_ids=windows.ids, use_cache=False).logits
        smallest = (joined - logits).abs().max().item()
        check(smallest > 0.02, f"{name}: documents move the logits by {smallest} only")
    for change in case["features"]:
        changed = AutoModelForCausalLM.from_config(new_config(case, **change),
                                                   dtype=torch.float32,
                                                   attn_implementation="eager").eval()
        changed.load_state_dict(model.state_dict())
        with torch.no_grad():
            moved = (ref.forward(changed, windows) - logits).abs().max().item()
        check(moved > 0.02, f"{name}: {change} moves the logits by {moved} only")
        smallest = moved if smallest is None else min(smallest, moved)
    return smallest


def check_transformers_loss(name, model, windows, loss):
    if windows.has_documents or not bool(windows.targets[:, 1:].all()):
        return
    with torch.no_grad():
        theirs = model(input_ids=windows.ids, labels=windows.ids, use_cache=False).loss.item()
    check(abs(theirs - loss) < 1e-5 * loss, f"{name}: transformers' loss {theirs}, ours {loss}")


def bf16_errors(folder, windows, logits, grads):
    """How far torch's own bf16 run is from the fp32 one."""
    theirs, _, their_grads = ref.logits_and_gradients(ref.load_model(folder, torch.bfloat16),
                                                      windows)
    errors = {"bf16_logits_err": np.array((theirs - logits).abs().max().item())}
    for name, grad in grads.items():
        error = (their_grads[name] - grad).abs().max() / grad.abs().max()
        errors[f"bf16_grad_err.{name}"] = np.array(error.item())
    return errors


def train_twice(folder, windows):
    """The golden run, and the run with gradients rounded to bf16 as stoker stores them."""
    losses, norms = ref.train(folder, windows, **TRAINING)
    rounded_losses, rounded_norms = ref.train(folder, windows, **TRAINING, round_gradients=True)
    apart = float(np.max(np.abs(rounded_losses / losses - 1)))
    check(apart < 1e-3, f"{folder}: rounding gradients moves a training loss by {apart}")
    check(losses[-1] < 0.85 * losses[0], f"{folder}: the loss does not fall")
    tensors = {"train_losses": losses, "train_grad_norms": norms,
               "train_losses_bf16_grads": rounded_losses,
               "train_grad_norms_bf16_grads": rounded_norms}
    return tensors, apart


def make_case(name, out):
    case = CASES[name]
    folder = os.path.join(out, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    seed = zlib.crc32(name.encode())
    rng = np.random.Generator(np.random.PCG64(seed))
    write_model(folder, case, rng)
    data = os.path.join(folder, "data.safetensors")
    write_data(data, case, rng)

    windows = ref.Windows(*ref.load_tokens(data), case["seq"])
    check(windows.count == case["windows"], f"{name}: {windows.count} windows")
    model = ref.load_model(folder)
    logits, loss, grads = ref.logits_and_gradients(model, windows)
    check_spellings(folder, logits, windows)
    check_transformers_loss(name, model, windows, loss)
    moved = check_features(name, case, model, windows, logits)
    if windows.has_documents:
        check_documents(model, windows, logits)

    trained, apart = train_twice(folder, windows)
    errors = bf16_errors(folder, windows, logits, grads)
    tensors = {"logits": logits.numpy(), "loss": np.array(loss, dtype=np.float64)}
    tensors.update({f"grad.{n}": g.numpy() for n, g in grads.items()})
    tensors.update(trained)
    tensors.update(errors)
    # require, not ascontiguousarray: that one would turn scalars (shape []) into vectors of one.
    save_file({n: np.require(t, requirements="C") for n, t in tensors.items()},
              os.path.join(folder, "golden.safetensors"))
    describe(folder, name, case, windows, model, errors, moved, apart, seed, trained, loss)


def describe(folder, name, case, windows, model, errors, moved, apart, seed, trained, loss):
    stored = ref.load_checkpoint_tensors(folder)
    grads = [float(v) for n, v in errors.items() if n.startswith("bf16_grad_err.")]
    write_json(os.path.join(folder, "golden.json"), {
        "case": name, "model_type": case["family"], "spelling": case["spelling"], "seed": seed,
        "seq": windows.seq, "windows": windows.count, "batch": windows.count,
        "vocab_size": case["config"]["vocab_size"],
        "targets": int(windows.targets.sum()), "has_loss_mask": bool(case.get("mask")),
        "document_offsets": case.get("documents"), "input_ids_dtype": case["dtype"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": sorted(stored), "sharded": "shard_bytes" in case,
        "steps": TRAINING["steps"], "lr": TRAINING["lr"], "schedule": "constant",
        "beta1": TRAINING["betas"][0], "beta2": TRAINING["betas"][1], "eps": TRAINING["eps"],
        "weight_decay": TRAINING["weight_decay"], "clip": TRAINING["clip"],
        "optimizer": "adamw", "shuffle": False,
        "loss": loss,
        "first_and_last_loss": [float(trained["train_losses"][i]) for i in (0, -1)],
        "first_and_last_grad_norm": [float(trained["train_grad_norms"][i]) for i in (0, -1)],
        "bf16_logits_err": float(errors["bf16_logits_err"]), "bf16_grad_err_max": max(grads),
        "smallest_move_without_a_feature": moved,
        "largest_relative_loss_change_by_bf16_grads": apart,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "safetensors": safetensors.__version__, "numpy": np.__version__}})


def main():
    parser = argparse.ArgumentParser(description="Write golden folders from transformers.")
    parser.add_argument("cases", nargs="*", help="all when none is named")
    parser.add_argument("--out", default=HERE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in args.cases or CASES:
        check(name in CASES, f"no case {name}; there are {', '.join(CASES)}")
        make_case(name, args.out)
        with open(os.path.join(args.out, name, "golden.json"), encoding="utf-8") as f:
            made = json.load(f)
        size = sum(os.path.getsize(os.path.join(args.out, name, f))
                   for f in os.listdir(os.path.join(args.out, name)))
        losses, norms = made["first_and_last_loss"], made["first_and_last_grad_norm"]
        print(f"{name}: {made['parameters']} parameters, {size / 1024:.0f} KiB, "
              f"loss {losses[0]:.3f} -> {losses[1]:.3f}, norm {norms[0]:.2f} -> {norms[1]:.2f}, "
              f"bf16 err logits {made['bf16_logits_err']:.2g} "
              f"grad {made['bf16_grad_err_max']:.2g}, "
              f"bf16 grads move losses {made['largest_relative_loss_change_by_bf16_grads']:.1e}, "
              f"feature {made['smallest_move_without_a_feature']}", flush=True)


if __name__ == "__main__":
    main()
