"""The words that rows of a policy are written with.

    "LlamaDecoderLayer": [
        norm("input_layernorm", "post_attention_layernorm"),
        region(enter="mlp", col=("mlp.gate_proj", "mlp.up_proj"), row="mlp.down_proj"),
    ]

All names are relative to the module that the row is listed under; ``""`` is that module itself. Sizes that leave a rank
without any element are replicated by themselves; what cannot be split otherwise is reported when the plan is compiled.
A new word is a new `shardcore.policy.Row` in `shardcore.rows` with a constructor here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from shardcore.nn import ColumnLinear, Replicated, RowLinear, SharedNumpy, SharedRandom, VocabEmbedding
from shardcore.policy import HeadCounts, Row
from shardcore.region_rows import EnterArgRow, Fused, RegionRow
from shardcore.rows import (
    AttributeRow,
    CallsRow,
    HeadRow,
    LayerDropRow,
    LossRow,
    NormRow,
    OutputsRow,
    RefuseRow,
    ReplicateRow,
    SwapRow,
    WhenDivisibleRow,
    per_rank,
)
from shardcore.sequence_rows import SequenceRow

__all__ = [
    "attribute",
    "calls",
    "col",
    "enter_arg",
    "head",
    "layer_drop",
    "local_groups",
    "local_heads",
    "loss",
    "norm",
    "outputs",
    "partial",
    "per_rank",
    "refuse",
    "region",
    "replicate",
    "row",
    "segments",
    "sequence",
    "shared_numpy",
    "shared_rng",
    "vocab",
    "when_divisible",
]

#: A column linear by its name, or one that computes several projections.
Columns = str | Fused


def vocab(*names: str, optional: bool = False) -> Row:
    """Split embeddings over their rows (vocabulary)."""
    return SwapRow(text=_text("vocab", *names), optional=optional, names=names, target=VocabEmbedding)


def col(*names: str, gather_output: bool = False, optional: bool = False) -> Row:
    """Split linears over their output features; each enters by itself.

    Prefer `region` wherever a module boundary marks the entry: it sums the input gradients of all its linears at once,
    and overlaps the communication.
    """
    options = (("gather_output", gather_output),)
    text = _text("col", *names, gather_output=gather_output or None)
    return SwapRow(text=text, optional=optional, names=names, target=ColumnLinear, options=options)


def row(*names: str, parallel_input: bool = True, optional: bool = False) -> Row:
    """Split linears over their input features; the outputs are summed over the ranks."""
    options = (("parallel_input", parallel_input),)
    text = _text("row", *names, parallel_input=None if parallel_input else False)
    return SwapRow(text=text, optional=optional, names=names, target=RowLinear, options=options)


def head(*names: str, bias: str | None = None, optional: bool = False) -> Row:
    """Split output heads over the vocabulary; the logits are gathered.

    Args:
        *names: the linears.
        bias: a bare parameter that only stands for their bias, as in BERT, where a module holds it beside the decoder.
        optional: they may be absent.
    """
    return HeadRow(text=_text("head", *names, bias=bias), optional=optional, names=names, bias=bias)


def layer_drop(name: str) -> Row:
    """A module that leaves out blocks at random in training (LayerDrop, https://arxiv.org/abs/1909.11556).

    It draws from the stream that all ranks share, so that they leave out the same blocks. Data-parallel replicas draw
    other numbers and gather parameters block by block: with several of them it is refused.

    Args:
        name: the attribute with the probability.
    """
    return LayerDropRow(text=_text("layer_drop", name), name=name)


def norm(*names: str, rms: str | None = None, optional: bool = False) -> Row:
    """Norms outside regions: they keep their forward, on replicated parameters.

    Args:
        *names: the norms.
        rms: the attribute with the constant below the root, if the norms are root-mean-square norms written out in
            Python (``weight * x / sqrt(mean(x**2) + eps)``): ``enable_fused_normalization`` then runs torch's.
        optional: they may be absent.
    """
    return NormRow(text=_text("norm", *names, rms=rms), optional=optional, names=names, rms=rms)


def replicate(*names: str, optional: bool = False) -> Row:
    """Modules (with everything below them) or bare parameters that every rank holds whole."""
    return ReplicateRow(text=_text("replicate", *names), optional=optional, names=names)


def partial(*names: str, optional: bool = False) -> Row:
    """Replicated modules inside of regions, which each rank uses for its part: their gradients are summed.

    Norms on queries and keys, learned activations, a norm between a region's entry and its columns. With the module
    that a region is entered at, its own bare parameters are meant.
    """
    options = (("partial", True),)
    return SwapRow(text=_text("partial", *names), optional=optional, names=names, target=Replicated, options=options)


def region(
    *,
    col: Columns | tuple[Columns, ...],
    row: str,
    enter: str | None = None,
    arg: str | None = None,
    also: str | tuple[str, ...] = (),
    after: str | tuple[str, ...] = (),
    kv: str | tuple[str, ...] = (),
    unit: Literal["column", "head"] = "column",
    heads: str | None = None,
    optional: bool = False,
) -> Row:
    """A pair of column linears and a row linear between which activations are split.

    Args:
        col: linears split over their output features; `segments` for one that computes several projections.
        row: the linear, split over its input features, that ends the region.
        enter: the module whose call enters the region, which must not contain the residual connection; ``None`` lets
            the column linears enter, each at its own call and with a sum of its own.
        arg: the entering argument of that module's ``forward``; by default the first.
        also: further arguments that arrive in the region because an `enter_arg` above let them in.
        after: modules or bare parameters inside the module ``enter`` that act on what ``row`` returns, and so need no
            `partial`: a norm or a scale at its end.
        kv: key and value linears. With fewer KV heads than ranks, neighbouring ranks share copies of a head.
        unit: what must stay whole: single columns, or attention heads as the policy's ``Heads`` check counts them.
        heads: the attribute that counts the heads of this one module, in place of the policy's check.
        optional: the region may be absent.
    """
    text = _text(
        "region",
        enter=enter,
        arg=arg,
        also=also or None,
        after=after or None,
        col=col,
        kv=kv or None,
        row=row,
        unit=None if unit == "column" else unit,
        heads=heads,
    )
    columns = col if isinstance(col, tuple) else (col,)
    return RegionRow(
        text=text,
        optional=optional,
        enter=enter,
        arg=arg,
        also=_tuple(also),
        after=_tuple(after),
        col=tuple(str(c.name if isinstance(c, Fused) else c) for c in columns),
        segments=tuple(c for c in columns if isinstance(c, Fused)),
        kv=_tuple(kv),
        row=row,
        unit="head" if heads else unit,
        heads=heads,
    )


def segments(name: str, count: int, *, by: Literal["projection", "head"] = "projection") -> Fused:
    """A linear that computes ``count`` equal projections at once; for ``col=`` of a `region`.

    Args:
        name: the linear.
        count: the number of projections.
        by: the order of its output features: projection after projection, [q|k|v], each of which is split; or head by
            head, [q0 k0 v0|q1 k1 v1|...], which is split between heads.
    """
    return Fused(name, count, by)


def enter_arg(module: str, name: str, *, optional: bool = False) -> Row:
    """Let a further tensor into the regions of a whole stack of blocks, once: the states that all of them attend to.

    One backward all-reduce for the model, instead of one in each block. The regions that it arrives in say ``also=``.

    Args:
        module: the module whose call the tensor enters with (``""`` for the one that the row is listed under).
        name: the argument of its ``forward``; None and tensors without a gradient pass.
        optional: the module may be absent.
    """
    return EnterArgRow(text=_text("enter_arg", module, name), optional=optional, module=module, name=name)


def loss(
    fn: Callable[..., Any], *, labels: str | tuple[str, ...] = "labels", logits: str | tuple[str, ...] = "logits"
) -> Row:
    """Compute the loss of a model that computes it inside its ``forward``, from the outputs of that forward.

    The labels are taken out of the arguments, the model's own forward runs without them, and ``fn(model, *logits,
    *labels)`` is put first into what it returns.

    Args:
        fn: returns the loss; called with the model, the named outputs and the named labels.
        labels: the arguments with labels; without the first of them the model runs as it is.
        logits: the outputs that ``fn`` takes.
    """
    text = _text("loss", labels=labels, logits=logits)
    return LossRow(text=text, function=fn, labels=_tuple(labels), logits=_tuple(logits))


def sequence(*, scatter: str, gather: str, stack: str = "", optional: bool = False) -> Row:
    """Between which modules of a stack activations may be split along the sequence.

    Under ``enable_sequence_parallelism`` each rank holds some of the tokens there, outside regions; elsewhere all of
    them. Which norms and biases then have partial gradients follows from their place. The module that the row is listed
    under is the one whose ``forward`` runs the blocks, or calls ``stack``.

    Args:
        scatter: the first block of a list (``"layers[0]"``), whose input is split.
        gather: the module whose output is whole again: the last norm, or where there is none the last block
            (``"layer[-1]"``).
        stack: the module whose ``forward`` runs the blocks, if the row is listed under the one that calls it.
        optional: the modules may be absent.
    """
    named: dict[str, Any] = {"scatter": scatter, "gather": gather, "stack": stack}
    return SequenceRow(text=_text("sequence", **named), optional=optional, **named)


def shared_rng(*names: str, optional: bool = False) -> Row:
    """Modules that draw the same random numbers on all ranks wherever they run (dropping whole samples or paths)."""
    return SwapRow(text=_text("shared_rng", *names), optional=optional, names=names, target=SharedRandom)


def shared_numpy(*methods: str) -> Row:
    """Methods that draw from numpy's global generator (masks of SpecAugment): the same numbers on all ranks.

    They are those of the module that the row is listed under. `shardcore.manual_seed` reaches them, numpy's own seed
    does not.
    """
    text = _text("shared_numpy", *methods)
    return SwapRow(text=text, names=("",), target=SharedNumpy, options=(("methods", methods),))


def calls(*methods: str) -> Row:
    """Methods besides ``forward`` that people run the module by (``forward_features``, ``get_image_features``).

    They are those of the module that the row is listed under. In them the random stream of the model is in use, the
    bare parameters of the module that are replicated are whole tensors, and FSDP2 has gathered what it would for a
    forward. They may call each other and the forward.
    """
    return CallsRow(text=_text("calls", *methods), methods=methods)


def when_divisible(size: str, row: Row, *, otherwise: Row) -> Row:
    """Use ``row`` where the ranks divide a size of the module, and ``otherwise`` where they do not.

    Args:
        size: an attribute of the module that the row is listed under (dots reach into submodules), such as a number of
            heads that differs from stage to stage.
        row: the row for modules where it divides.
        otherwise: the row for the others, such as `replicate`.
    """
    text = f"when_divisible({size!r}, {row}, otherwise={otherwise})"
    return WhenDivisibleRow(text=text, size=size, row=row, otherwise=otherwise)


def refuse(
    when: Callable[[nn.Module], bool],
    why: str,
    *,
    todo: str = "build the model without it, or pass shard() a policy of your own",
) -> Row:
    """Refuse a variant of the model that cannot be split; what else would not fit in it is not reported.

    Args:
        when: called with the module that the row is listed under; tells whether it is such a variant.
        why: what it is, and why it cannot be split.
        todo: what to do instead.
    """
    return RefuseRow(text=_text("refuse", getattr(when, "__name__", "when")), when=when, why=why, todo=todo)


def attribute(name: str, value: Any, *, optional: bool = False, literal: bool = False) -> Row:
    """Set an attribute (dots reach into submodules) to what one rank needs.

    Args:
        name: the attribute; it must exist.
        value: the new value, `per_rank` for this rank's part of the old one, or a function of the `HeadCounts` such as
            `local_heads`.
        optional: the submodule may be absent.
        literal: a function is the value itself.
    """
    shown = value.__name__ if inspect.isfunction(value) else repr(value)
    text = f"attribute({name!r}, {shown})"
    return AttributeRow(text=text, optional=optional, name=name, value=value, literal=literal)


def outputs(
    *,
    attentions: Literal["heads"] | None = None,
    cross_attentions: Literal["heads"] | None = None,
    hidden_states: Literal["sequence"] | None = None,
    places: str | tuple[str, ...] = (),
    heads: str | None = None,
    optional: bool = False,
) -> Row:
    """Make captured outputs of the module that collects them whole again.

    Args:
        attentions: ``"heads"`` if attention weights (B, heads, S, S) hold this rank's heads only.
        cross_attentions: likewise of the attention to another sequence, (B, heads, S, T).
        hidden_states: ``"sequence"`` if hidden states of blocks hold this rank's tokens under sequence parallelism.
        places: outputs that keep their place when they are None and the module returns a tuple (``return_dict=False``);
            most modules leave them out.
        heads: the attribute that counts the heads, where not all stacks of the model have equally many.
        optional: the module may be absent.
    """
    captured = {"attentions": attentions, "cross_attentions": cross_attentions}
    by_heads = tuple(name for name, what in captured.items() if what == "heads")
    text = _text("outputs", **captured, hidden_states=hidden_states, places=places or None, heads=heads)
    by_tokens = ("hidden_states",) if hidden_states == "sequence" else ()
    return OutputsRow(
        text=text, optional=optional, by_heads=by_heads, by_tokens=by_tokens, places=_tuple(places), heads=heads
    )


def local_heads(heads: HeadCounts) -> int:
    """Query heads of one rank."""
    return heads.local_query


def local_groups(heads: HeadCounts) -> int:
    """Query heads of one rank for each KV head that it uses."""
    return heads.local_query // heads.local_kv


def _text(word: str, *names: Any, **named: Any) -> str:
    parts = [repr(n) if isinstance(n, str) else str(n) for n in names]
    parts += [f"{key}={value!r}" for key, value in named.items() if value is not None]
    return f"{word}({', '.join(parts)})"


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
