"""In which form the two linears of an adapter stand at a parallel linear, so that nothing further is sent for them.

| base | first (A) | second (B), magnitudes | where they are added |
|---|---|---|---|
| column, member of a region | replicated, gradient summed | split as the base's rows are | this rank's features |
| column, entered at itself | replicated; its output enters | the same | the same; before the base gathers |
| row | split as the base's columns are | replicated, gradient summed | this rank's summand, before the one sum |
| replicated | as the base | as the base | whole |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardcore.comm.strided import Runs
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn import (
    ColumnLinear,
    FusedColumnLinear,
    HeadParameters,
    ParallelMixin,
    Replicated,
    RowLinear,
    VocabEmbedding,
    VocabHead,
)
from shardcore.nn.mixin import mixins
from shardcore.nn.sequence.shard import SequenceShard
from shardcore_peft._dora import Magnitude
from shardcore_peft._linears import Entering, PartLinear, Summand, UsedLinear


@dataclass(frozen=True, slots=True)
class Form:
    """A mixin and its options; with the tokens that its module sees, where they are split."""

    mixin: type[ParallelMixin]
    options: dict[str, Any] = field(default_factory=dict)
    tokens: SequenceShard | None = None

    def take(self, module: nn.Module, context: ShardContext) -> None:
        """Give ``module``, whose parameters are whole and plain, this form."""
        new = self.mixin.from_native_module(module, context, **self.options)
        new._take_sequence(self.tokens)


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms at one base.

    Attributes:
        first: of the linear that takes the input of the base.
        second: of the linear that makes its output.
        magnitude: of the magnitudes of that output (DoRA).
        finishes: the base adds up, or gathers, what this rank has of its output, and that comes after the adapter.
        shared: the input is the same on all ranks, so that a dropout has to draw the same on all.
        tokens: how the input is split along the sequence.
    """

    first: Form
    second: Form
    magnitude: Form
    finishes: bool = False
    shared: bool = False
    tokens: SequenceShard | None = None


def forms_at(base: nn.Module, where: str) -> Forms:
    """Return the forms of an adapter at ``base``, a module of a sharded model.

    Raises:
        NotSupportedError: no form is known.
    """
    if isinstance(base, ColumnLinear):
        return _at_column(base)
    if isinstance(base, RowLinear):
        columns = None if base.exchange is None else base.exchange.used
        summed = {"partial": True}
        return Forms(_split(1, columns), Form(Summand, summed), Form(Magnitude, summed), finishes=True)
    if isinstance(base, VocabEmbedding):
        return Forms(Form(Replicated), Form(Replicated), Form(Magnitude), shared=True)
    if type(base).__mro__[1:] and any(b is Replicated for b in mixins(base)):
        tokens = base.__dict__.get("_shard_sequence")
        options = {"partial": bool(base.__dict__["_summed"])}
        form = Form(Replicated, options, tokens)
        return Forms(form, form, Form(Magnitude, options, tokens), shared=tokens is None, tokens=tokens)
    raise NotSupportedError(
        f"an adapter at {where}: nothing is known about what a {type(base).__module__}.{type(base).__qualname__} has "
        "of its input and output on each rank. Leave it out of target_modules, or merge the adapter before shard() "
        "(merge_and_unload())"
    )


def scales_at(base: nn.Module, where: str, *, of_input: bool) -> Form:
    """Return the form of vectors that scale the input, or the output, of ``base`` (IA3).

    Raises:
        NotSupportedError: none is known.
    """
    if isinstance(base, ColumnLinear) and not base.gather_output and not isinstance(base, VocabHead):
        if of_input and (base.sole_region is not None or base.enters_alone):
            return Form(Replicated, {}, None if base.sole_region is None else base.sole_region.sequence)
        if of_input:
            return Form(Replicated, {"partial": True})
        if _rows(base) is None:
            return Form(HeadParameters, {"dim": 0})
    elif isinstance(base, RowLinear):
        if of_input and base.parallel_input and base.exchange is None:
            return Form(HeadParameters, {"dim": 1})
        if not of_input:
            return Form(Replicated, {}, base._shard_sequence)
    elif any(mixin is Replicated for mixin in mixins(base)):
        return forms_at(base, where).first
    raise NotSupportedError(_no_scales(type(base), where, of_input=of_input))


def check_scales(kind: type, options: Mapping[str, Any], where: str, *, of_input: bool) -> None:
    """Refuse vectors that scale the input, or the output, of what becomes a ``kind`` with ``options``.

    `scales_at` would, once the model has been changed.

    Raises:
        NotSupportedError: no form of them is known.
    """
    if issubclass(kind, ColumnLinear):
        parts = issubclass(kind, FusedColumnLinear) or options.get("replication", 1) > 1 or options.get("used")
        gathers = issubclass(kind, VocabHead) or options.get("gather_output")
        wrong = gathers or (parts and not of_input)
    elif issubclass(kind, RowLinear):
        wrong = of_input and (options.get("used") or not options.get("parallel_input", True))
    else:
        wrong = False
    if wrong:
        raise NotSupportedError(_no_scales(kind, where, of_input=of_input))


def _no_scales(kind: type, where: str, *, of_input: bool) -> str:
    return (
        f"scales (IA3) of the {'input' if of_input else 'output'} of {where}: nothing is known about what each rank "
        f"has of it at this {kind.__qualname__}. Leave it out of target_modules, or merge the adapter before shard()"
    )


def _at_column(base: ColumnLinear) -> Forms:
    rows = _rows(base)
    second = _split(0, rows)
    magnitude = Form(Magnitude, {"split": True} if rows is None else {"used": rows, "partial": True})
    finishes = base.gather_output or isinstance(base, VocabHead)
    if base.sole_region is not None:
        tokens = base.sole_region.sequence
        first = Form(Entering, {}, tokens)
        return Forms(first, second, magnitude, finishes=finishes, shared=True, tokens=tokens)
    first = Form(Entering) if base.enters_alone else Form(Replicated, {"partial": True})
    return Forms(first, second, magnitude, finishes=finishes, shared=True)


def _split(dim: int, used: Runs | None) -> Form:
    return Form(PartLinear, {"dim": dim}) if used is None else Form(UsedLinear, {"dim": dim, "used": used})


def _rows(base: ColumnLinear) -> Runs | None:
    """Return the rows of the whole weight that this rank multiplies by; None if they are its part, as DTensor cuts."""
    if isinstance(base, FusedColumnLinear):
        return base.bias_rows
    if base.exchange is not None:
        return base.exchange.used
    if base.rows is not None:
        return base.rows
    if base.group_size > 1:
        context = base._shard_context
        step = base.out_features * base.group_size // context.size
        start = context.rank // base.group_size * step
        return ((start, start + step),)
    return None
