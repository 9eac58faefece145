"""The linears of an adapter, by where they stand: PEFT's own objects, each with a mixin of the core or of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.dtensor_params import read_partial
from shardcore.comm.strided import Runs
from shardcore.mesh.context import ShardContext
from shardcore.nn import Layout, ParallelMixin, Replicated, ReplicatedLayout, ShardedLayout, SharedRandom
from shardcore.nn.linear.functional import local_linear
from shardcore.nn.sequence.shard import SequenceShard, enter_region


class PartLinear(ParallelMixin):
    """A linear of which this rank multiplies the part that it holds: weight (out/tp, in), or (out, in/tp).

    Input (..., in) inside of a region, output (..., out/tp); or input (..., in/tp), output (..., out), this rank's
    summand.

    Options:
        dim: of the weight, along which it is split.
    """

    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    option_names: ClassVar[frozenset[str]] = frozenset({"dim"})

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, *, dim: int = 0, **options: Any) -> Mapping[str, Layout]:
        layouts: dict[str, Layout] = {"weight": ShardedLayout(dim)}
        if module._parameters.get("bias") is not None:
            layouts["bias"] = ShardedLayout(0)
        return layouts

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Multiply by this rank's part."""
        bias: Any = self.bias
        weight: Any = self.weight
        return local_linear(input, weight, bias)


class UsedLinear(ParallelMixin):
    """A linear that every rank holds whole, and of which each uses the rows, or the columns, of its heads.

    For a base whose ranks use other rows than they hold. The gradients of the parameters are summed over the ranks.

    Options:
        used: the rows (of ``dim`` 0) or columns (of ``dim`` 1) that this rank uses.
        dim: see ``used``.
    """

    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    option_names: ClassVar[frozenset[str]] = frozenset({"dim", "used"})

    _used: tuple[Runs, int]
    _shard_context: ShardContext

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        held = [name for name, parameter in module._parameters.items() if parameter is not None]
        return dict.fromkeys(held, ReplicatedLayout(partial_gradient=True))

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, used: Runs = (), dim: int = 0, **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        new._used = (used, dim)
        return new

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Multiply by what this rank uses."""
        held: list[Any] = [self.weight] if self.bias is None else [self.weight, self.bias]
        context = self._shard_context
        weight, *bias = read_partial(context.channel, *held, deferred=context.defers)
        runs, dim = self._used
        parts = [_cut(tensor, runs, dim) for tensor in (weight, *bias)]
        return F.linear(input, *parts)


def _cut(full: Tensor, runs: Runs, dim: int) -> Tensor:
    parts = [full.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Summand(Replicated):
    """The second linear of an adapter whose base is summed over the ranks: the first rank alone adds its bias."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Return this rank's summand, (..., r) to (..., out)."""
        own: Any = self._read(self._parameters, fresh=False)
        bias = own["bias"]
        if bias is not None and self._shard_context.rank > 0:
            bias = bias * 0  # not left out: all ranks sum the gradient
        return F.linear(input, own["weight"], bias)


class Entering(Replicated):
    """The first linear of an adapter whose base enters its region by itself: what it returns, (..., r), enters.

    So its input is outside of the region, its weight whole, and what is summed over the ranks in the backward (or,
    under sequence parallelism, gathered in the forward) has r features, not those of the model.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return (..., r), entered; all tokens, where the sequence is split."""
        out = super().forward(*args, **kwargs)
        return enter_region(out, self._shard_context.channel, self._shard_sequence, "an adapter")


class AdapterDropout(SharedRandom):
    """The dropout of an adapter whose input is the same on all ranks: so is its mask, though the base forks the stream.

    Where the input is this rank's tokens, each rank draws its own.
    """

    _shard_tokens: SequenceShard | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the shared stream, unless tokens are split."""
        if self._shard_tokens is not None and self._shard_tokens.length is not None:
            return super(SharedRandom, self).forward(*args, **kwargs)
        return super().forward(*args, **kwargs)
