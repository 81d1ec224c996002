#!/usr/bin/env python3
"""A few training steps of a Llama-shaped model of 207 million parameters on the CPU, by torch or DeepSpeed.

    python3 step.py MODE BATCH SEQ [--clip 1.0] [--steps 5] [--threads 2] [--dir DIR]

MODE: torch_bf16 (parameters and states bf16, no fp32 master), torch_ckpt (the same, activation checkpointing), torch_fp32amp (fp32 master, autocast
bf16), ds_cpu (DeepSpeed ZeRO-3, parameters and optimizer offloaded to host memory), ds_nvme (both on NVMe in DIR, pipelined). AdamW, lr 1e-4. Prints each
step's seconds and last a line `... median step X s, Y tok/s, maxrss Z GB`; the first step is warm-up. bench/step_peers.py and bench/peers.py read it.
"""
import argparse
import os
import resource
import statistics
import tempfile
import time

LR = 1e-4


def model_and_ids(batch, seq):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                         num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=False)
    return LlamaForCausalLM(config), torch.randint(0, 32000, (batch, seq))


def torch_steps(mode, model, ids, clip):
    import torch
    if mode != "torch_fp32amp":
        model = model.bfloat16()
    if mode == "torch_ckpt":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "torch_fp32amp"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()
    return step


def deepspeed_steps(mode, model, ids, clip, batch, folder):
    import deepspeed
    cpu = {"device": "cpu", "pin_memory": False}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu, "overlap_comm": True}
    if mode == "ds_nvme":
        nvme = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
        zero["offload_optimizer"] = dict(nvme, buffer_count=5, pipeline_read=True, pipeline_write=True)
        zero["offload_param"] = dict(nvme, buffer_count=8, buffer_size=70000000)
    config = {"train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True}, "gradient_clipping": clip, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": {"lr": LR}},
              "aio": {"block_size": 1048576, "queue_depth": 32, "thread_count": 2, "single_submit": False, "overlap_events": True}}
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    deepspeed.init_distributed("gloo")
    model = model.bfloat16()
    model.gradient_checkpointing_enable()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step():
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()
    return step


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("mode", choices=["torch_bf16", "torch_ckpt", "torch_fp32amp", "ds_cpu", "ds_nvme"])
    p.add_argument("batch", type=int)
    p.add_argument("seq", type=int)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--dir", help="for ds_nvme; default: a temporary folder")
    args = p.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        model, ids = model_and_ids(args.batch, args.seq)
        params = sum(x.numel() for x in model.parameters())
        if args.mode.startswith("torch"):
            step = torch_steps(args.mode, model, ids, args.clip)
        else:
            step = deepspeed_steps(args.mode, model, ids, args.clip, args.batch, folder)
        del model
        seconds = []
        for i in range(args.steps):
            begin = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - begin)
            print(f"step {i + 1}: {seconds[-1]:.2f} s, loss {loss:.3f}", flush=True)
        median = statistics.median(seconds[1:])
        print(f"{args.mode}: {params / 1e6:.0f}M parameters, median step {median:.2f} s, {args.batch * args.seq / median:.2f} tok/s, "
              f"maxrss {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB", flush=True)
    os._exit(0)  # some backends hang in their own clean-up


if __name__ == "__main__":
    main()
