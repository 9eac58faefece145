"""What the ranks of `gpu_streams` do: random models, random batches, and sums over the bits of what comes out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcore
from shardcore.mesh.axes import current_device, device_type_of
from shardcore.transfer import products

__all__ = ["Drawn", "draw", "train"]

_TP = 2


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A model and its batches.

    Attributes:
        config: fields of its configuration.
        fields: of `shardcore.shard`.
        dtype: of its parameters, by its name in torch.
        batches: (rows, tokens) of each step, on a replica.
        replicas: how many there are.
    """

    config: dict[str, Any]
    fields: dict[str, Any]
    dtype: str
    batches: list[tuple[int, int]]
    replicas: int = 1
    tied: bool = field(default=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return _TP * self.replicas


def draw(seed: int, steps: int, ranks: int) -> Drawn:
    """Draw a small Llama, how it is sharded over at most so many ranks, and ``steps`` batches."""
    drawn = random.Random(seed)
    heads = drawn.choice((4, 8))
    config = {
        "hidden_size": drawn.choice((64, 128, 256)),
        "intermediate_size": drawn.choice((96, 160, 512)),
        "num_hidden_layers": drawn.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": drawn.choice((1, 2, heads)),
        "head_dim": drawn.choice((16, 32)),
        "vocab_size": drawn.randint(64, 200),
        "attn_implementation": drawn.choice(("eager", "sdpa")),
        "use_cache": False,
    }
    fields: dict[str, Any] = {"parallel_output": drawn.random() < 0.5}
    if drawn.random() < 0.5:
        fields |= {"enable_sequence_parallelism": True, "sequence_keep_gathered": drawn.random() < 0.5}
        fields["enable_sequence_overlap"] = drawn.random() < 0.5
    if drawn.random() < 0.5:
        fields["enable_fused_normalization"] = True
    return Drawn(
        config=config,
        fields=fields,
        dtype=drawn.choice(("float32", "bfloat16")),
        batches=[(drawn.randint(1, 4), drawn.randint(8, 96)) for _ in range(steps)],
        replicas=2 if ranks >= 2 * _TP and drawn.random() < 0.2 else 1,
        tied=drawn.random() < 0.3,
    )


def train(drawn: Drawn, seed: int) -> list[dict[str, Any]]:
    """Train on this rank, and return the loss and a sum over the bits of each gradient of every step.

    The host asks the device for nothing before the last step is sent, so that it runs as far ahead as it can.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    # Some kernels of CUDA add in any order otherwise. What `torch.empty` gives is not filled, which takes more kernels.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made at run time
    products._ROWS = 16  # so that few tokens travel in several pieces
    device = current_device(device_type_of())
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**drawn.config, tie_word_embeddings=drawn.tied))
    model = model.to(getattr(torch, drawn.dtype))
    model = shardcore.shard(model, tp=_TP, dp=drawn.replicas, **drawn.fields).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed + dist.get_rank() // _TP)  # a batch for each replica
    left = []
    for rows, tokens in drawn.batches:
        ids = torch.randint(0, drawn.config["vocab_size"], (rows, tokens), generator=generator)
        if device.type == "cuda":
            ids = ids.pin_memory().to(device, non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        left.append((loss.detach(), _sums(model)))
        optimizer.step()
        optimizer.zero_grad()
    return [_as_numbers(loss, sums) for loss, sums in left]


def _as_numbers(loss: Tensor, sums: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": float(loss).hex(), "gradients": {name: int(found) for name, found in sums.items()}}


def _sums(model: nn.Module) -> dict[str, Tensor]:
    """Return for each gradient the sum of its elements' bits times their places, modulo 2^64: exact in any order."""
    sums = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grad: Any = parameter.grad
        local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
        bits = local.contiguous().view({2: torch.int16, 4: torch.int32}[local.element_size()]).flatten().long()
        sums[name] = (bits * torch.arange(1, 2 * bits.numel(), 2, device=bits.device)).sum()
    return sums
