"""The vocabulary-parallel embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds, reduce_from_tp
from shardcore.comm.dtensor_params import expect_dtensor, read_local
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, forward
from shardcore.nn.layout import Layout, ShardedLayout, last_rank_is_empty
from shardcore.nn.linear.alike import lookup_problem
from shardcore.nn.linear.functional import can_look_at


class VocabEmbedding(ParallelMixin, nn.Embedding):
    """An embedding whose rows are split: weight (V/tp, H), the last part smaller if V does not divide.

    Input (...) of token ids, the same on all ranks; output (..., H), the same on all ranks. Each rank looks up the ids
    of its rows and fills the places of others with zeros; an all-reduce sums the results. As in the native module, the
    row ``padding_idx`` gets no gradient.

    A subclass with a forward of its own (a scaled embedding) keeps running it, around this one, if it reaches its table
    by ``super().forward`` alone.
    """

    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding,)
    plan_serves_super: ClassVar[bool] = True

    #: The rows of the full table that this rank has.
    rows: tuple[int, int]
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, **options: Any) -> str | None:
        if (problem := super().problem(module, ranks)) or not isinstance(module, nn.Embedding):
            return problem
        # What is derived from this class computes all by itself, and nothing native runs around it.
        own = "plan_serves_super" not in vars(cls) and type(module).forward is not nn.Embedding.forward
        if problem := f"{type(module).__qualname__} has a forward of its own" if own else lookup_problem(module):
            return f"{problem}; replicate it, or bring a ParallelModule for it"
        if last_rank_is_empty(module.num_embeddings, ranks):
            return (
                f"num_embeddings {module.num_embeddings} leaves the last of {ranks} ranks without any row; "
                "replicate the module"
            )
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, name):
                return f"an embedding with {name} cannot be split: the rows of other ranks would be needed"
        return None

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        return {"weight": ShardedLayout(0)}

    @classmethod
    @override
    def plan_sums_gradients(cls, **options: Any) -> bool:
        return False

    @classmethod
    @override
    def plan_on_split_tokens(cls, **options: Any) -> str | None:
        return "an embedding between split tokens would look up other ids on each rank"

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        yield forward(site.path, "all_reduce", "(B, S, H) output")

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context)
        new.rows = chunk_bounds(new.num_embeddings, context.size, context.rank)
        return new

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Return (..., H) for ids (...).

        Raises:
            IndexError: an id is not in the table (checked on the CPU, as the native module does).
        """
        if can_look_at(input):
            self._check(input)
        (weight,) = read_local(expect_dtensor(self.weight), fresh=True)
        start, stop = self.rows
        elsewhere = (input < start) | (input >= stop)
        local_ids = (input - start).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < stop else None
        out = F.embedding(local_ids, weight, own_padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_from_tp(out, self._shard_context.channel, fresh=True)

    def _check(self, ids: Tensor) -> None:
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_embeddings):
            raise IndexError(
                f"token id out of range: got ids from {int(ids.min())} to {int(ids.max())}, the table has "
                f"{self.num_embeddings} rows"
            )

    def extra_repr(self) -> str:
        """Describe the full table, this rank's rows and the number of ranks."""
        return f"{super().extra_repr()}, tp={self._shard_context.size}, rows={self.rows[0]}:{self.rows[1]}"
