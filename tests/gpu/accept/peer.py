#!/usr/bin/env python3
"""The same model and steps in torch, for tests/gpu/accept.sh: needs torch and a card, nothing else.

    peer.py --mode plain|fsdp --config config.json --seq 2048 --batch 8 --micro-batch 2 --steps 5 [--cap-gib 24]

plain: everything on the card: bf16 parameters, an fp32 master and its AdamW (fused), clipping 1.0: the numbers that stoker keeps, 16 bytes a
parameter and the gradients. fsdp: FSDP2 (torch.distributed.fsdp.fully_shard, a process group of one) with CPUOffloadPolicy: fp32 parameters,
gradients and AdamW in host memory, bf16 on the card, each layer gathered when it is used; gradients go to the host once a step. --cap-gib: what
torch's allocator may take on the card. Prints a JSON line a step. Exit 4: there is no torch, or it sees no card.
"""
import argparse, json, os, sys, tempfile, time

try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError as why:
    print(why)
    sys.exit(4)


class Norm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """A Llama's layer (Touvron et al. 2023): grouped-query attention with rotary positions, SwiGLU, RMS norms before both."""

    def __init__(self, c):
        super().__init__()
        h, self.heads, self.kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = h // self.heads
        self.n1, self.n2 = Norm(h, c["rms_norm_eps"]), Norm(h, c["rms_norm_eps"])
        self.q = nn.Linear(h, self.heads * self.dim, bias=False)
        self.kv_ = nn.Linear(h, 2 * self.kv * self.dim, bias=False)
        self.o = nn.Linear(self.heads * self.dim, h, bias=False)
        self.gate_up = nn.Linear(h, 2 * c["intermediate_size"], bias=False)
        self.down = nn.Linear(c["intermediate_size"], h, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        y = self.n1(x)
        q = rotate(self.q(y).view(b, s, self.heads, self.dim).transpose(1, 2), cos, sin)
        k, v = self.kv_(y).view(b, s, 2 * self.kv, self.dim).transpose(1, 2).chunk(2, dim=1)
        a = F.scaled_dot_product_attention(q, rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.kv != self.heads)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.n2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, ids):
        dim = self.c["hidden_size"] // self.c["num_attention_heads"]
        at = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        angle = torch.outer(at, self.c["rope_theta"] ** (-torch.arange(0, dim, 2, device=ids.device, dtype=torch.float32) / dim))
        x = self.embed(ids)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))[:, :-1].reshape(-1, self.c["vocab_size"])
        return F.cross_entropy(logits.float(), ids[:, 1:].reshape(-1))


def init(model):
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)


class Plain:
    def __init__(self, config):
        with torch.device("cuda"):
            self.model = Model(config).to(torch.bfloat16)
        init(self.model)
        self.params = list(self.model.parameters())
        self.master = [p.detach().float() for p in self.params]
        self.adam = torch.optim.AdamW(self.master, lr=1e-4, weight_decay=0.01, fused=True)

    def backward(self, loss, last):
        loss.backward()

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        for p, m in zip(self.params, self.master):
            m.grad = p.grad.float()
            p.grad = None
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.master)


class Fsdp:
    def __init__(self, config):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        store = "file://" + os.path.join(tempfile.mkdtemp(), "store")
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
        self.model = Model(config)
        init(self.model)
        how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16), "offload_policy": CPUOffloadPolicy()}
        for layer in self.model.layers:
            fully_shard(layer, **how)
        fully_shard(self.model, **how)
        self.params = list(self.model.parameters())
        try:
            self.adam = torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.01, fused=True)
        except Exception:  # older: no fused AdamW for DTensors in host memory
            self.adam = torch.optim.AdamW(self.params, lr=1e-4, weight_decay=0.01)

    def backward(self, loss, last):
        self.model.set_requires_gradient_sync(last)
        loss.backward()

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--mode", choices=("plain", "fsdp"), required=True)
    p.add_argument("--config", required=True)
    for name in ("seq", "batch", "micro-batch", "steps"):
        p.add_argument("--" + name, type=int, required=True)
    p.add_argument("--cap-gib", type=float, default=0)
    args = p.parse_args()
    config = json.load(open(args.config))
    if not torch.cuda.is_available():
        print("torch sees no card")
        sys.exit(4)
    print("torch", torch.__version__, flush=True)
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    if args.cap_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * 2**30 / total))
    trainer = (Plain if args.mode == "plain" else Fsdp)(config)
    micros = args.batch // args.micro_batch
    for step in range(args.steps):
        ids = torch.randint(config["vocab_size"], (args.batch, args.seq), device="cuda")
        torch.cuda.synchronize()
        begin, losses = time.perf_counter(), []
        for k in range(micros):
            loss = trainer.model(ids[k * args.micro_batch:(k + 1) * args.micro_batch]) / micros
            trainer.backward(loss, k + 1 == micros)
            losses.append(loss.detach())
        trainer.step()
        torch.cuda.synchronize()
        s = time.perf_counter() - begin
        print(json.dumps({"mode": args.mode, "step": step + 1, "step_s": s, "tokens_per_s": args.batch * args.seq / s,
                          "loss": float(sum(losses)), "peak_bytes": torch.cuda.max_memory_reserved()}), flush=True)
    if args.mode == "fsdp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
