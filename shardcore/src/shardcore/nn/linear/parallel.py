"""Column- and row-parallel linears (Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import copy_to_tp, gather_from_tp, reduce_from_tp, split_to_tp
from shardcore.comm.dtensor_params import read_local, read_partial
from shardcore.comm.exchange import Exchange, exchange_rows, misused
from shardcore.comm.strided import Runs
from shardcore.mesh.context import ShardContext
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import (
    ExchangedLayout,
    GroupShardedLayout,
    Layout,
    ReplicatedLayout,
    ShardedLayout,
    last_rank_is_empty,
)
from shardcore.nn.linear.functional import local_linear, multiply
from shardcore.nn.linear.members import Member, ParallelLinear, read_together, shared_parameters
from shardcore.nn.region.inner import SoleRegion
from shardcore.nn.region.region import OPEN, MemberLinear, Region, require_entered
from shardcore.nn.sequence.shard import SequenceShard, leave_region

#: The rows, or columns, that each rank uses, by rank; None where these are what it holds.
Used: TypeAlias = tuple[Runs, ...] | None

# Key under which column linears that enter by themselves fork the random stream, and row linears join it.
_OWN_FORK = "linears"


def _empty_part(module: nn.Module, name: str, size: int, ranks: int) -> str:
    return (
        f"{type(module).__name__} has {name} {size}, which leaves the last of {ranks} ranks without any; "
        f"replicate the module, or use at most {size} ranks"
    )


_TRANSPOSED = "the heads of a weight of (in, out) have to be the parts that ranks hold: use a size that divides them"


def _divides(rows: int, ranks: int) -> bool:
    """Tell whether the rows of a linear divide evenly by ``ranks``, so that no part has rows of two heads."""
    return rows % ranks == 0


class ColumnLinear(Member):
    """A linear whose output features are split: weight (out/tp, in), or (in, out/tp) if transposed; bias (out/tp).

    Input (..., in), the same on all ranks; output (..., out/tp), or (..., out) with ``gather_output``. Alone it sums
    its input gradient itself, with one backward all-reduce for each such linear. As a member of a region
    (`shardcore.nn.region.region.Region`) it does not: the entry of the region sums once for all members.

    Options:
        gather_output: return the full output on every rank.
        replication: so many neighbouring ranks compute the same output features (fewer KV heads than ranks); 1 splits
            over all ranks. Above 1 the weight and the bias are still split over all ranks, and each group of neighbours
            gathers their rows in the forward. Where out_features does not divide by the number of ranks, every rank has
            the full parameters, uses its rows of them, and their gradients are summed.
        used: the rows that each rank computes, by rank, where they are not the part that it holds. Parameters are split
            as ever; ranks send each other the rows that they use in the forward, and the gradients back.
        in_parts: False: with ``replication`` above 1 or ``used`` every rank has the full parameters, so that the
            forward sends nothing for them.
        enters: False if activations enter elsewhere (the linear is a member of a region).
    """

    option_names: ClassVar[frozenset[str]] = frozenset({"enters", "gather_output", "in_parts", "replication", "used"})

    gather_output: bool
    enters_alone: bool
    #: The region that is entered here, of which this linear is the only member; None for any other.
    sole_region: SoleRegion | None
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(
        cls,
        module: nn.Module,
        ranks: int,
        *,
        replication: int = 1,
        used: Used = None,
        gather_output: bool = False,
        **options: Any,
    ) -> str | None:
        if problem := super().problem(module, ranks):
            return problem
        product = cls.computes(module)
        if used is not None and (replication > 1 or gather_output):
            return "used= says which rows each rank computes, so replication= and gather_output= cannot"
        if problem := misused(used, "out_features", product.out_features, ranks):
            return problem
        if ranks % replication or product.out_features % (ranks // replication) * (replication > 1):
            return f"out_features {product.out_features} cannot be shared by groups of {replication} of {ranks} ranks"
        if (replication > 1 or used is not None) and product.transposed:
            return _TRANSPOSED
        if replication == 1 and last_rank_is_empty(product.out_features, ranks):
            return _empty_part(module, "out_features", product.out_features, ranks)
        return None

    @classmethod
    @override
    def layouts(
        cls,
        module: nn.Module,
        ranks: int,
        *,
        replication: int = 1,
        in_parts: bool = True,
        used: Used = None,
        **options: Any,
    ) -> Mapping[str, Layout]:
        product = cls.computes(module)
        layout: Layout = ShardedLayout(0)
        summed = ReplicatedLayout(partial_gradient=True)
        if used is not None:
            layout = ExchangedLayout(0) if in_parts else summed
        elif replication > 1:
            in_parts = in_parts and _divides(product.out_features, ranks)
            layout = GroupShardedLayout(0, replication) if in_parts else summed
        layouts = {name: layout for name, p in module._parameters.items() if p is not None}
        return {**layouts, "weight": ShardedLayout(1)} if product.transposed else layouts

    @classmethod
    @override
    def plan_enters(cls, *, enters: bool = True, **options: Any) -> bool:
        return enters

    @classmethod
    @override
    def plan_on_split_tokens(cls, *, enters: bool = True, **options: Any) -> str | None:
        return "it enters by itself, after its module has read the number of tokens" if enters else None

    @classmethod
    @override
    def plan_collectives(
        cls, site: Site, *, gather_output: bool = False, enters: bool = True, **options: Any
    ) -> Iterator[Collective]:
        if gather_output and not site.splits_logits:
            yield forward(site.path, "all_gather", "(B, S, V) output")
        if enters:
            yield backward(site.path, "all_reduce", "(B, S, H) input gradient")
            yield from shared_parameters(site.path, [site])

    @classmethod
    @override
    def swap_class(
        cls,
        module: nn.Module,
        context: ShardContext,
        *,
        gather_output: bool = False,
        replication: int = 1,
        enters: bool = True,
        in_parts: bool = True,
        used: Used = None,
        **options: Any,
    ) -> Self:
        new = super().swap_class(module, context)
        new.group_size, new.reading, new.rows, new.exchange = 1, None, None, None
        if used is not None and in_parts:
            new.exchange = Exchange(used, new.out_features, context.rank)
        elif used is not None:
            new.rows = used[context.rank]
        elif replication > 1 and in_parts and _divides(new.out_features, context.size):
            context.join_neighbours(replication)
            new.group_size = replication
        elif replication > 1:
            step = new.out_features * replication // context.size
            start = context.rank // replication * step
            new.rows = ((start, start + step),)
        new.bias_rows = new.rows
        new.gather_output = gather_output
        new.enters_alone = enters
        new.sole_region = None
        return new

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Return (..., out/tp), or (..., out) with ``gather_output``."""
        out = self.local(input)
        return self.finish(out) if self.gather_output else out

    def finish(self, out: Tensor) -> Tensor:
        """Return what the linear does for this rank's part of its output, which `local` and others have added up."""
        exact = self._shard_context.channel.exact
        return gather_from_tp(out, exact, -1, self.out_features) if self.gather_output else out

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output: (..., in) to (..., out/tp)."""
        if self.sole_region is not None:
            return self.sole_region.multiply(x)
        if self.enters_alone:
            # One enter for each linear, though several may be called with one tensor: whether it is one is nothing that
            # all ranks agree on (a backward hook makes another object of it).
            if torch.is_grad_enabled():
                x = copy_to_tp(x, self._shard_context.channel)
            if not self.gather_output:
                self._fork()
            return self.product(x)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            region = getattr(x, OPEN, None)
            member = None if region is None or region.version != x._version else region.members.get(id(self))
            if member is not None:
                out: Tensor = MemberLinear.apply(region, member, x)  # type: ignore[no-untyped-call]
                return out
            require_entered(self, x)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Multiply by this rank's rows, outside the fast path of a region: (..., in) to (..., out/tp)."""
        if self.uses_what_it_holds:
            return local_linear(x, self.weight, self.bias, transposed=self.transposed)
        # A compiled graph can pass nothing from one module to another.
        if not torch.compiler.is_compiling() and self.reading is not None and self.reading.is_of(self.own_parameters):
            return multiply(x, *self.reading.parameters, transposed=self.transposed)
        return multiply(x, *read_together(self._shard_context, [self])[0], transposed=self.transposed)

    def _fork(self) -> None:
        # Dropouts up to the row linear act on split activations. Nothing is known about them here; a compiled graph
        # cannot hold this (regions find their dropouts and can tell).
        random = self._shard_context.random
        if not torch.compiler.is_compiling() and (self.training or random.in_use) and not random.forked(_OWN_FORK):
            random.fork(_OWN_FORK)

    def extra_repr(self) -> str:
        """Describe the full linear and the number of ranks."""
        kind = f"gather_output={self.gather_output}"
        if self.group_size > 1:
            kind = f"gathered by {self.group_size} ranks"
        elif self.exchange is not None:
            kind = "rows exchanged"
        elif self.rows:
            kind = "rows=" + ",".join(f"{start}:{stop}" for start, stop in self.rows)
        return f"{super().extra_repr()}, {kind}"


class RowLinear(ParallelLinear):
    """A linear whose input features are split: weight (out, in/tp), or (in/tp, out) if transposed; bias (out), whole.

    Input (..., in/tp); output (..., out), summed over the ranks, then the bias is added once.

    Options:
        parallel_input: False if the input is the full (..., in), and has to be split first.
        used: the columns that each rank multiplies with, by rank, where they are not the part that it holds, as `used`
            of `ColumnLinear`. Parallel input only.
    """

    option_names: ClassVar[frozenset[str]] = frozenset({"parallel_input", "used"})
    plan_sums_output: ClassVar[bool] = True

    parallel_input: bool
    #: How ranks get the columns that they use; None if each uses what it holds.
    exchange: Exchange | None
    #: The region that this linear ends; None if it stands alone.
    region: Region | None
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(
        cls, module: nn.Module, ranks: int, *, parallel_input: bool = True, used: Used = None, **options: Any
    ) -> str | None:
        if problem := super().problem(module, ranks):
            return problem
        product = cls.computes(module)
        if used is not None and not parallel_input:
            return "used= says which columns each rank multiplies with, and parallel_input=False that parts are equal"
        if used is not None and product.transposed:
            return _TRANSPOSED
        if problem := misused(used, "in_features", product.in_features, ranks):
            return problem
        if last_rank_is_empty(product.in_features, ranks):
            return _empty_part(module, "in_features", product.in_features, ranks)
        return None

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, *, used: Used = None, **options: Any) -> Mapping[str, Layout]:
        dim = 0 if cls.computes(module).transposed else 1
        layouts: dict[str, Layout] = {"weight": ShardedLayout(dim) if used is None else ExchangedLayout(dim)}
        if module._parameters.get("bias") is not None:
            layouts["bias"] = ReplicatedLayout()
        return layouts

    @classmethod
    @override
    def plan_collectives(cls, site: Site, *, used: Any = None, **options: Any) -> Iterator[Collective]:
        if used is not None:
            yield forward(site.path, "all_to_all", "columns of its weight")
            yield backward(site.path, "all_to_all", "gradients of these columns")
        yield forward(site.path, "reduce_scatter" if site.split else "all_reduce", "(B, S, H) output")
        if site.split:
            yield backward(site.path, "all_gather", "(B, S/tp, H) output gradient")
        if site.split and site.sums_at_once and site.layout("bias") is not None:
            yield backward(site.path, "all_reduce", "gradient of its bias")

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, parallel_input: bool = True, used: Used = None, **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        new.parallel_input = parallel_input
        new.exchange = None if used is None else Exchange(used, new.in_features, context.rank, dim=1)
        new.region = None
        return new

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Return (..., out), the same on all ranks; or this rank's tokens of it, where the sequence is split."""
        # Two nodes on purpose: non-reentrant checkpointing stops its recomputation before the second, which saves
        # nothing, and so repeats one collective less for each block.
        x = input if self.parallel_input else self.part_of(input)
        context, tokens = self._shard_context, self._shard_sequence
        overlaps = context.overlap and context.fuses and torch.is_grad_enabled() and self.exchange is None
        if tokens is None or tokens.length is None or not overlaps:
            return self.finish(self.local(x))
        tokens.expect(x, tokens.length, type(self).__name__)
        return self.finish(local_linear(x, self.weight, transposed=self.transposed, scatters=context), summed=True)

    def part_of(self, x: Tensor) -> Tensor:
        """Return this rank's features (..., in/tp) of an input as `forward` takes it."""
        return x if self.parallel_input else split_to_tp(x, self._shard_context.channel, -1)

    def finish(self, out: Tensor, *, summed: bool = False) -> Tensor:
        """Leave the region with this rank's summand (..., out), which `local` and others have added up.

        ``summed``: these are this rank's tokens of the sum already.
        """
        context, tokens = self._shard_context, self._shard_sequence
        if self.region is not None:
            self.region.leave()
        elif not torch.compiler.is_compiling():
            context.random.join(_OWN_FORK)
        if not summed:
            out = leave_region(out, context.channel, tokens, type(self).__name__, fresh=True)
        if self.bias is None:
            return out
        if tokens is None or tokens.length is None:
            (bias,) = read_local(self.bias)
        else:
            (bias,) = read_partial(context.channel, self.bias, deferred=context.defers)
        return out + bias.to(out.dtype)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the output, without the bias: (..., in/tp) to (..., out)."""
        if self.exchange is None:
            return local_linear(x, self.weight, transposed=self.transposed)
        return multiply(x, *exchange_rows(self._shard_context.channel, [self.exchange], [self.weight]))


class InnerRowLinear(RowLinear):
    """A linear inside of a region whose input features are split, and whose output each rank's channels read again.

    Input (..., in/tp); output (..., out), summed over the ranks. Its gradient is summed over them too, since each
    rank's channels use all of it. The region goes on: random numbers stay those of the rank, and tokens whole.
    """

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        yield forward(site.path, "all_reduce", "(B, S, ...) output")
        yield backward(site.path, "all_reduce", "(B, S, ...) output gradient")

    @override
    def _take_sequence(self, tokens: SequenceShard | None) -> None:
        """Tokens are whole inside of a region."""

    @override
    def finish(self, out: Tensor, *, summed: bool = False) -> Tensor:
        channel = self._shard_context.channel
        out = reduce_from_tp(out, channel, fresh=True)
        if self.bias is not None:
            (bias,) = read_local(self.bias)
            out = out + bias.to(out.dtype)
        return copy_to_tp(out, channel) if torch.is_grad_enabled() else out
