"""The systems of `pipeline.py`: one Llama through shardcore, through stages written by hand, and on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from systems import llama
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor

__all__ = [
    "MICRO_BATCHES",
    "SCHEDULES",
    "SIZES",
    "System",
    "Way",
    "by_hand",
    "sent_bytes",
    "through_shardcore",
    "unsharded",
]

MICRO_BATCHES = 8


@dataclass(frozen=True)
class Size:
    """A model, and the rows and tokens of one micro-batch."""

    shape: dict[str, int]
    rows: int
    tokens: int


SIZES = {
    "main": Size(
        {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 1376,
            "vocab_size": 1024,
        },
        rows=1,
        tokens=128,
    ),
    "host-bound": Size(
        {
            "hidden_size": 64,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 256,
        },
        rows=1,
        tokens=16,
    ),
}


@dataclass(frozen=True)
class Way:
    """A schedule.

    Attributes:
        kind: its class in `torch.distributed.pipelining`.
        chunks: stages of each rank.
        bubble: how much longer a step takes than the work of a rank, times micro-batches and stages of a rank, for two
            ranks. A bubble is filled with gradients of parameters but for a forward, a third of the work (Qi et al.
            2023, https://arxiv.org/abs/2401.10241).
    """

    kind: str
    chunks: int
    bubble: float

    def bounds(self, layers: int) -> list[int]:
        """Return where the stages begin, and where the last one ends: as many layers each."""
        stages = 2 * self.chunks
        return [layers * stage // stages for stage in range(stages + 1)]

    @property
    def longer(self) -> float:
        """How long a step takes, with the work of a rank as 1."""
        return 1 + self.bubble / (MICRO_BATCHES * self.chunks)


#: By the name that shardcore has for them.
SCHEDULES = {
    "1f1b": Way("Schedule1F1B", 1, 1.0),
    "interleaved": Way("ScheduleInterleaved1F1B", 2, 1.0),
    "interleaved_zero_bubble": Way("ScheduleInterleavedZeroBubble", 2, 1 / 3),
}


@dataclass(frozen=True)
class System:
    """Something that runs a step.

    Attributes:
        step: runs forward and backward of all micro-batches; gradients are added.
        model: holds the parameters; those of other stages have no gradients, or are not there.
    """

    step: Callable[[], Any]
    model: nn.Module

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that there are."""
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: g.to_local() if isinstance(g, DTensor) else g for name, g in found.items()}


def sent_bytes(size: Size, way: Way) -> int:
    """Return what all ranks send each other in a step: an activation and its gradient at each boundary."""
    activation = size.rows * size.tokens * size.shape["hidden_size"] * 4
    return 2 * MICRO_BATCHES * (2 * way.chunks - 1) * activation


def unsharded(native: Any, ids: Tensor) -> System:
    """One rank alone, one micro-batch after the other."""

    def step() -> None:
        for part in ids.chunk(MICRO_BATCHES):
            (native(input_ids=part, labels=part).loss / MICRO_BATCHES).backward()

    return System(step, native)


def through_shardcore(size: Size, schedule: str, ids: Tensor) -> System:
    """`shardcore.shard` and `train_step`."""
    import shard_llama.policy
    import shardcore

    way = SCHEDULES[schedule]
    model = shardcore.shard(
        llama(**size.shape).train(),
        pp=2,
        num_microbatches=MICRO_BATCHES,
        pipeline_schedule=schedule,
        num_model_chunks=way.chunks,
        pipeline_bounds=tuple(way.bounds(size.shape["num_hidden_layers"])),
        policy=shard_llama.policy.LlamaPolicy,
    )
    return System(lambda: model.train_step({"input_ids": ids, "labels": ids}), model)


class Whole(nn.Module):
    """A stage that calls the forward of transformers' model, with masks and rotary embeddings, on its layers."""

    def __init__(self, native: Any, held: range) -> None:
        super().__init__()
        config = copy.deepcopy(native.config)
        config.num_hidden_layers = len(held)
        with torch.device("meta"):
            self.model = type(native.model)(config)
        is_last = held.stop == len(native.model.layers)
        self.model.layers = nn.ModuleList(native.model.layers[i] for i in held)
        self.model.embed_tokens = None if held.start else native.model.embed_tokens
        self.model.norm = native.model.norm if is_last else nn.Identity()
        self.model.rotary_emb = native.model.rotary_emb
        self.head = native.lm_head if is_last else nn.Identity()

    def forward(self, arrived: Tensor) -> Tensor:
        """Return the states behind the layers of the stage, or logits."""
        given = {"input_ids": arrived} if self.model.embed_tokens is not None else {"inputs_embeds": arrived}
        logits: Tensor = self.head(self.model(**given).last_hidden_state)
        return logits


class Bare(Whole):
    """A stage that calls its layers one after the other: no masks, and rotary embeddings that were computed before."""

    def __init__(self, native: Any, held: range, tokens: int) -> None:
        super().__init__(native, held)
        self._rotary = native.model.rotary_emb(torch.zeros(1), position_ids=torch.arange(tokens)[None])

    def forward(self, arrived: Tensor) -> Tensor:
        """Return the states behind the layers of the stage, or logits."""
        states = arrived if self.model.embed_tokens is None else self.model.embed_tokens(arrived)
        for layer in self.model.layers:
            states = layer(states, attention_mask=None, position_embeddings=self._rotary)
        logits: Tensor = self.head(self.model.norm(states))
        return logits


def by_hand(size: Size, schedule: str, ids: Tensor, native: Any, *, bare: bool = False) -> System:
    """`PipelineStage` of torch around parts of ``native``, whose parameters get the gradients."""
    way, rank = SCHEDULES[schedule], dist.get_rank()
    bounds = way.bounds(size.shape["num_hidden_layers"])
    count = len(bounds) - 1
    stages = [_stage(size, native, bounds, index, bare) for index in range(rank, count, 2)]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = native.loss_function(logits=logits, labels=labels, vocab_size=size.shape["vocab_size"])
        return value

    kind: Any = getattr(pipelining, way.kind)
    made = kind(stages if way.chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=loss)  # the mean over micro-batches
    first: Sequence[Tensor] = (ids,) if rank == 0 else ()
    last: Mapping[str, Tensor] = {"target": ids} if rank == 1 else {}
    return System(lambda: made.step(*first, return_outputs=False, **last), native)


def _stage(size: Size, native: Any, bounds: list[int], index: int, bare: bool) -> pipelining.PipelineStage:
    held, count = range(bounds[index], bounds[index + 1]), len(bounds) - 1
    module = Bare(native, held, size.tokens) if bare else Whole(native, held)
    rows = (size.rows, size.tokens)

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    arrives = meta(*rows, size.shape["hidden_size"]) if index else torch.empty(rows, dtype=torch.long, device="meta")
    leaves = meta(*rows, size.shape["vocab_size" if index == count - 1 else "hidden_size"])
    device = torch.device("cpu")
    return pipelining.PipelineStage(module, index, count, device, input_args=arrives, output_args=leaves)
