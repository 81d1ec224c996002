#!/usr/bin/env python3
"""The predicted step of 8B and 14B models on a machine one does not have, by tokens per step, update mode and placement.

    python3 bench/predict_table.py --stoker build/stoker [--machine rtx4090] [--json F]
    python3 bench/predict_table.py --stoker build/stoker --models 6.7B,14.8B --states auto,no-nvme --updates auto --micro-batch 4
        --tokens 8192,16384,32768,65536 --host-memory 64GiB,32GiB

Writes a Markdown table: for each model, number of tokens and update mode, the fastest micro-batch and activation policy of those tried, in
tokens per second. Needs neither the machine nor the weights: `stoker plan --machine` reads a configuration only.
"""
import argparse, itertools, json, os, struct, subprocess, tempfile

MODELS = {
    "8B": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
           "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "14B": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "6.7B": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
             "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
             "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
}
MODELS["14.8B"] = MODELS["14B"]
# auto: what the planner chooses with the machine's drives; no-nvme: on the same machine without any
STATES = {"auto": [], "no-nvme": [],
          "RAM": ["--params", "host", "--optimizer-state", "host", "--grads", "host"],
          "NVMe": ["--params", "host", "--optimizer-state", "nvme", "--grads", "host"]}
SEQ = 1024


def without_drives(args, work):
    """The machine's file, its drives left out."""
    path = args.machine
    if not os.path.exists(path):
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "share", "machines", args.machine + ".json")
    with open(path) as f:
        machine = dict(json.load(f), drives=[])
    out = os.path.join(work, "machine.json")
    with open(out, "w") as f:
        json.dump(machine, f)
    return out


def plan(args, work, model, tokens, micro, activations, update, state, extra):
    out = os.path.join(work, "p.json")
    if os.path.exists(out):
        os.remove(out)
    machine = without_drives(args, work) if state == "no-nvme" else args.machine
    command = [args.stoker, "plan", "--machine", machine, "--model", os.path.join(work, model),
               "--data", os.path.join(work, "data.bin"), "--steps", "1", "--seq", str(SEQ), "--batch", str(tokens // SEQ),
               "--micro-batch", str(micro), "--activations", activations, "--update", update, "--json", out] + STATES[state] + extra
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr.strip()
    with open(out) as f:
        result = json.load(f)
    return (result, "") if "step_s" in result else (None, result["why"])


def best(args, work, model, tokens, update, state, extra=()):
    found, why = None, ""
    acts = ("auto",) if update == "auto" else ("host", "recompute", "keep")  # auto: all that the planner chooses
    for micro, act in itertools.product(map(int, args.micro_batch.split(",")), acts):
        if micro * SEQ > tokens:
            continue
        result, text = plan(args, work, model, tokens, micro, act, update, state, list(extra))
        if result is None:
            why = text
        elif found is None or result["step_s"] < found["step_s"]:
            found = dict(result, micro_batch=micro, activations=act)
    return found, why


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--stoker", required=True)
    p.add_argument("--machine", default="rtx4090")
    p.add_argument("--models", default="8B,14B")
    p.add_argument("--tokens", default="4096,8192,16384,32768")
    p.add_argument("--updates", default="serial,chase,split,speculate,auto")
    p.add_argument("--states", default="RAM,NVMe")
    p.add_argument("--micro-batch", default="2,4,8,16", help="sizes to try")
    p.add_argument("--host-memory", default="", help="budgets, e.g. 64GiB,32GiB; default: the machine's memory")
    p.add_argument("--json")
    args = p.parse_args()
    print("| model | states | tokens | update | tok/s | step s | busiest (share of the step) | waits s: nvme, copy, update, other "
          "| micro-batch, activations | host, device |")
    print("|---" * 10 + "|")
    with tempfile.TemporaryDirectory() as work:
        with open(os.path.join(work, "data.bin"), "wb") as f:
            f.write(struct.pack("<H", 1) * (64 * SEQ + 1))
        for model in args.models.split(","):
            os.mkdir(os.path.join(work, model))
            with open(os.path.join(work, model, "config.json"), "w") as f:
                json.dump(MODELS[model], f)
            for budget, state, tokens, update in itertools.product(args.host_memory.split(","), args.states.split(","),
                                                                   map(int, args.tokens.split(",")), args.updates.split(",")):
                r, why = best(args, work, model, tokens, update, state, ["--host-memory", budget] if budget else [])
                if r is None:
                    why = why.splitlines()[-1].replace("|", "/") if why else ""
                    print("| %s | %s | %d | %s | - | | | | %s | %s |" % (model, state, tokens, update, why[:240], budget), flush=True)
                    continue
                x, b = r["exposed_s"], r["peak_bytes"]
                print("| %s | %s | %d | %s | %.0f | %.2f | %s (%.0f %%) | %.2f, %.2f, %.2f, %.2f | %d x %d, %s | %.0f GiB, %.1f GiB |"
                      % (model, state, tokens, update, r["tokens_per_s"], r["step_s"], r["busiest"],
                         100 * r["busiest_s"] / r["step_s"], x["nvme"], x["copy"], x["update"], x["other"], r["micro_batch"], SEQ,
                         r["activations"], b["host"] / 2**30, b["device"] / 2**30), flush=True)
                if args.json:
                    with open(args.json, "a") as f:
                        f.write(json.dumps({"bench": "predict_table", "model": model, "states": state, "update": update, **r}) + "\n")


if __name__ == "__main__":
    main()
