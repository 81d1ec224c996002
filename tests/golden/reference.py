"""What stoker's numbers are compared with: windows, masks, loss and training steps, in torch.

Shared by make_golden.py (writes the committed files) and compare_live.py (compares with a running
stoker). Knows transformers and torch; knows nothing of stoker's own files.

Windows. The token stream is cut into consecutive, disjoint runs of `seq` tokens; a last short one
is dropped. A window is the scope of attention: nothing before its first token is seen.

Positions restart at 0 at the first token of a window and at the first token of each document inside
it, so a document that began in an earlier window goes on at position 0: what transformers would
see if it were given the window alone. (Rotary embeddings are relative, so where a document's
positions begin changes the numbers only by rounding.)

Attention goes from a token to itself and to earlier tokens of the same document in the same window
and, in a sliding layer, only to distances below `sliding_window` (the token itself counts as one).

Targets. The token at place t >= 1 of a window is a target, predicted from place t - 1, unless its
`loss_mask` is 0 or it is the first token of a document. The loss is the mean over the targets of
all windows of the step.
"""

import json
import os

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def load_tokens(path):
    """Read a token file: ids (int64), loss_mask (bool or None), document_offsets (or None)."""
    if not path.endswith(".safetensors"):
        return np.fromfile(path, dtype="<u2").astype(np.int64), None, None
    with safe_open(path, framework="np") as f:
        names = set(f.keys())
        ids = f.get_tensor("input_ids").astype(np.int64).reshape(-1)
        mask = f.get_tensor("loss_mask").reshape(-1) != 0 if "loss_mask" in names else None
        docs = f.get_tensor("document_offsets") if "document_offsets" in names else None
    return ids, mask, docs


class Windows:
    """The windows of a token file as torch tensors, first axis = window, in file order."""

    def __init__(self, ids, mask, docs, seq):
        count = len(ids) // seq
        if count == 0:
            raise ValueError(f"{len(ids)} tokens do not fill one window of {seq}")
        self.seq, self.count, self.has_documents = seq, count, docs is not None
        starts = np.zeros(len(ids), dtype=bool)
        if docs is not None:
            starts[docs[docs < len(ids)]] = True
        used = count * seq
        starts = starts[:used].reshape(count, seq)
        self.ids = torch.from_numpy(ids[:used].reshape(count, seq).copy())
        keep = np.ones((count, seq), bool) if mask is None else mask[:used].reshape(count, seq)
        target = keep & ~starts
        target[:, 0] = False
        self.targets = torch.from_numpy(target)
        # Document number inside the window, and the place where that document begins in it.
        self.document = torch.from_numpy(np.cumsum(starts, axis=1))
        place = np.arange(seq)
        begin = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
        self.positions = torch.from_numpy(place - begin)

    def slice(self, begin, end):
        """Windows begin..end-1 as a Windows of their own."""
        part = object.__new__(Windows)
        part.seq, part.count, part.has_documents = self.seq, end - begin, self.has_documents
        for name in ("ids", "targets", "document", "positions"):
            setattr(part, name, getattr(self, name)[begin:end])
        return part


def additive_mask(windows, dtype, sliding=None):
    """A 4-D mask (window, 1, query, key): 0 where attention goes, the lowest number elsewhere."""
    place = torch.arange(windows.seq)
    distance = place[:, None] - place[None, :]
    allowed = distance >= 0
    if sliding is not None:
        allowed &= distance < sliding
    same = windows.document[:, :, None] == windows.document[:, None, :]
    mask = torch.zeros(windows.count, 1, windows.seq, windows.seq, dtype=dtype)
    return mask.masked_fill(~(allowed & same)[:, None], torch.finfo(dtype).min)


def model_inputs(model, windows):
    """Arguments of model(...). Without documents transformers makes its own masks and positions."""
    inputs = {"input_ids": windows.ids, "use_cache": False}
    if not windows.has_documents:
        return inputs
    config, dtype = model.config, model.dtype
    inputs["position_ids"] = windows.positions
    sliding = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:  # Qwen2, Qwen3: a mask for each kind of layer
        masks = {"full_attention": additive_mask(windows, dtype)}
        if "sliding_attention" in kinds:
            masks["sliding_attention"] = additive_mask(windows, dtype, sliding)
        inputs["attention_mask"] = masks
    else:  # Llama, and Mistral where every layer slides
        if config.model_type != "mistral":
            sliding = None
        inputs["attention_mask"] = additive_mask(windows, dtype, sliding)
    return inputs


def forward(model, windows):
    return model(**model_inputs(model, windows)).logits


def mean_loss(logits, windows):
    """Mean cross entropy over all targets, in float64 from the logits on."""
    chosen = windows.targets[:, 1:]
    logits = logits[:, :-1][chosen].double()
    return F.cross_entropy(logits, windows.ids[:, 1:][chosen])


def logits_and_gradients(model, windows):
    """Logits, loss and the gradient of the loss by parameter name (float32)."""
    model.zero_grad(set_to_none=True)
    logits = forward(model, windows)
    loss = mean_loss(logits, windows)
    loss.backward()
    grads = {n: p.grad.float().clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return logits.detach().float(), loss.item(), grads


def load_model(folder, dtype=torch.float32):
    """A model as a user loads it. In bf16 transformers keeps the rotary frequencies in fp32 when it
    loads that way; `model.bfloat16()` would round them too and flatter whoever is compared."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True,
        output_loading_info=True)
    # A missing tensor would only be a warning there, and random numbers here.
    wrong = {k: info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[k]}
    if wrong:
        raise ValueError(f"{folder} does not load cleanly: {wrong}")
    return model.eval()


def load_checkpoint_tensors(folder):
    """All tensors of a folder, sharded or not, by name."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return load_file(os.path.join(folder, "model.safetensors"))
    with open(index) as f:
        shards = sorted(set(json.load(f)["weight_map"].values()))
    tensors = {}
    for shard in shards:
        tensors.update(load_file(os.path.join(folder, shard)))
    return tensors


def round_bf16(x):
    """fp32 rounded to bf16 values, ties away from zero, still fp32: how stoker makes its parameters
    from the master. Adding half to the bit pattern rounds the magnitude, whatever the sign."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x8000) & ~0xFFFF).view(torch.float32)


def train(folder, windows, steps, lr, betas, eps, weight_decay, clip, round_gradients=False):
    """Losses and gradient norms (before clipping) of `steps` steps, each over all windows.

    fp32 master weights in torch.optim.AdamW (weight decay decoupled and on every tensor, norms and
    biases too); the model computes in fp32 with the master rounded to bf16. With `round_gradients`
    each gradient is rounded to bf16 before the norm, the clip and Adam, as stoker stores it.
    """
    model = load_model(folder).train()
    params = [p for _, p in model.named_parameters()]
    masters = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                                  foreach=False, fused=False)
    losses, norms = [], []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss = mean_loss(forward(model, windows), windows)
        loss.backward()
        for param, master in zip(params, masters):
            master.grad = round_bf16(param.grad) if round_gradients else param.grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(masters, clip, foreach=False).item())
        losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters):
                param.copy_(round_bf16(master.detach()))
    return np.array(losses), np.array(norms)
