"""A small decoder whose attention gets its biases in several ways, or makes keys of latent states, or has channels.

What varies is the class of its blocks' mixers; embedding, norms, head and loss are the same for all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from own_words import per_head
from tiny import randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcore.policy import Heads, ModulePolicy, Policy, Stages
from shardcore.styles import (
    attribute,
    by_heads,
    head,
    norm,
    partial,
    per_rank,
    region,
    replicate,
    segments,
    sequence,
    slice_arg,
    vocab,
)

HEADS, WIDTH, SIZE, PLACES = 4, 16, 4, 9
SETTINGS = [{}, {"enable_sequence_parallelism": True}, {"parallel_output": True}]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)  # (B, heads, S, SIZE)


def _joined(weights: Tensor, values: Tensor) -> Tensor:
    return (weights.softmax(-1) @ values).transpose(1, 2).flatten(2)


def _distances(x: int) -> Tensor:
    places = torch.arange(x)
    return (places[:, None] - places).abs()


class Biased(nn.Module):
    """Attention with slopes (B * heads, 1, S), a bias (heads, S, S) and a mask (B, heads or 1, S, S)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = HEADS

    def forward(self, x: Tensor, slopes: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (_heads(linear(x)) for linear in (self.q, self.k, self.v))
        weights = q @ k.transpose(-1, -2) + slopes.view(x.size(0), self.heads, 1, -1) + bias
        return self.out(_joined(weights if mask is None else weights + mask, v))


class Handing(nn.Module):
    """Attention that makes a bias by heads of a table, or is given what another one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(PLACES, HEADS)
        self.zeros = False

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (_heads(linear(x)) for linear in (self.q, self.k, self.v))
        if bias is None:
            if torch.is_grad_enabled() and self.zeros:  # as T5 has them for its checkpoints
                bias = torch.zeros(1, q.size(1), x.size(1), x.size(1), dtype=x.dtype, requires_grad=True)
                return self.out(_joined(q @ k.transpose(-1, -2) + bias, v)), bias
            bias = self.table(_distances(k.size(2))).permute(2, 0, 1)
        return self.out(_joined(q @ k.transpose(-1, -2) + bias, v)), bias


class Latent(nn.Module):
    """Attention whose keys and values come from latent states, beside a rotary key that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, WIDTH)
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, 5 + SIZE), nn.LayerNorm(5)
        self.kv_b, self.out = nn.Linear(5, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(b, s, -1, SIZE).transpose(1, 2)
        latent, shared = self.kv_a(x).split((5, SIZE), -1)
        k, v = self.kv_b(self.kv_norm(latent)).view(b, s, -1, 2 * SIZE).transpose(1, 2).chunk(2, -1)
        weights = q @ (k + shared.unsqueeze(1)).transpose(-1, -2)
        return self.out(_joined(self.drop(weights), v))


class Direct(Latent):
    """The same, with queries straight from the states."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Identity(), nn.Identity(), nn.Linear(WIDTH, WIDTH)


class Continuous(nn.Module):
    """Attention with a bias that a network makes of distances, as Swin Transformer V2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.net = nn.Sequential(nn.Linear(1, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, HEADS, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(linear(x)) for linear in (self.q, self.k, self.v))
        bias = self.net(_distances(k.size(2)).to(x.dtype).unsqueeze(-1)).permute(2, 0, 1)
        return self.out(_joined(q @ k.transpose(-1, -2) + bias, v))


class Channels(nn.Module):
    """A gated mixer whose steps are made of all channels and read by each of them, as Mamba's are."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.steps = nn.Linear(WIDTH, 24), nn.Linear(24, 7)
        self.rates, self.out = nn.Linear(5, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        channels = self.into(x)
        steps, shift = self.steps(channels.tanh()).split((5, 2), -1)
        return self.out(channels * self.rates(steps).sigmoid() + shift.sum(-1, keepdim=True))


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), kind()

    def forward(self, x: Tensor, *given: Any) -> Any:
        out = self.mixer(self.norm(x), *given)
        return (x + out[0], out[1]) if isinstance(out, tuple) else x + out


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(PLACES, HEADS) if kind is Biased else None
        self.scale = nn.Linear(1, 1) if kind is Biased else None
        self.reentrant: bool | None = None  # None recomputes nothing

    def forward(self, ids: Tensor) -> Tensor:
        x, given = self.embed(ids), ()
        if self.table is not None and self.scale is not None:
            b, s = ids.shape
            slopes = torch.arange(1, HEADS + 1, dtype=x.dtype)[:, None] * torch.linspace(-1, 0, s, dtype=x.dtype)
            slopes = slopes[None] * torch.linspace(0.5, 1, b, dtype=x.dtype)[:, None, None]  # (B, heads, S)
            ramp = torch.linspace(0, 1, s * s, dtype=x.dtype).view(1, 1, s, s, 1).expand(b, -1, -1, -1, -1)
            mask = self.scale(ramp).squeeze(-1)  # (B, 1, S, S)
            given = (slopes.view(-1, 1, s), self.table(_distances(s)).permute(2, 0, 1), mask)
        for block in self.blocks:
            out = block(x, *given) if self.reentrant is None else self._again(block, x, *given)
            x, given = (out[0], (out[1],)) if isinstance(out, tuple) else (out, given)
        return self.norm(x)

    def _again(self, *arguments: Any) -> Any:
        return checkpoint(*arguments, use_reentrant=self.reentrant)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.config = type("Config", (), {"heads": HEADS})()
        self.stack, self.head = Stack(kind, **options), nn.Linear(WIDTH, 13)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.stack(ids))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(kind: type[nn.Module], **options: Any) -> Model:
    model = Model(kind, **options).double()
    randomize(model)
    return model


class ModelPolicy(Policy):
    """What all kinds have in common."""

    checks = (Heads("heads"),)
    stages = Stages(
        first="stack.embed",
        blocks="stack.blocks",
        last=("stack.norm", "head"),
        everywhere=("stack.table", "stack.scale"),
    )
    block: tuple[Any, ...] = ()
    stack: tuple[Any, ...] = ()

    def module_policy(self) -> ModulePolicy:
        common = [vocab("embed"), norm("norm"), sequence(scatter="blocks[0]", gather="norm")]
        return {
            "Model": [head("head")],
            "Stack": [*common, *self.stack],
            "Block": [norm("norm"), *self.block],
        }


QKV = ("mixer.q", "mixer.k", "mixer.v")


class BiasedPolicy(ModelPolicy):
    """The bias and the mask are made by replicated modules: their gradients are put together in each block."""

    stack = (replicate("table", "scale"),)
    block = (
        region(
            enter="mixer.x",
            col=QKV,
            row="mixer.out",
            unit="head",
        ),
        slice_arg("mixer", "slopes", 0),
        slice_arg("mixer", "bias", -3),
        slice_arg("mixer", "mask", 1),
        attribute("mixer.heads", per_rank),
    )


class SummingPolicy(BiasedPolicy):
    """They are made by partial modules, which sum their own gradients."""

    stack = (partial("table", "scale"),)
    block = (
        BiasedPolicy.block[0],
        slice_arg("mixer", "slopes", 0, heads="mixer.heads"),
        slice_arg("mixer", "bias", 0, partial=True),
        slice_arg("mixer", "mask", 1, partial=True),
        BiasedPolicy.block[-1],
    )


class HandingPolicy(ModelPolicy):
    block = (
        region(enter="mixer", col=QKV, row="mixer.out", unit="head"),
        per_head("mixer.table"),
    )


class LatentPolicy(ModelPolicy):
    block = (
        region(
            enter=("mixer.q_a", "mixer.kv_a"),
            col=("mixer.q_b", segments("mixer.kv_b", 2, by="head")),
            row="mixer.out",
            unit="head",
        ),
        replicate("mixer.q_a", "mixer.kv_a"),
        partial("mixer.q_norm", "mixer.kv_norm"),
    )


class DirectPolicy(ModelPolicy):
    block = (
        region(
            enter=("mixer.q_b", "mixer.kv_a"),
            col=("mixer.q_b", segments("mixer.kv_b", 2, by="head")),
            row="mixer.out",
            unit="head",
        ),
        replicate("mixer.kv_a"),
        partial("mixer.kv_norm"),
    )


class ContinuousPolicy(ModelPolicy):
    block = (
        region(enter="mixer", col=QKV, row="mixer.out", unit="head"),
        partial("mixer.net.0", "mixer.net.2"),
        by_heads("mixer.net.3"),
    )


class ChannelsPolicy(ModelPolicy):
    block = (region(enter="mixer", col=("mixer.into", "mixer.rates"), row=("mixer.steps", "mixer.out")),)
