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
from typing import Any, Literal

from shardcore.nn import ColumnLinear, Replicated, RowLinear, VocabEmbedding
from shardcore.policy import HeadCounts, Row
from shardcore.rows import AttributeRow, HeadRow, NormRow, OutputsRow, RegionRow, ReplicateRow, SwapRow

__all__ = [
    "attribute",
    "col",
    "head",
    "local_groups",
    "local_heads",
    "norm",
    "outputs",
    "partial",
    "region",
    "replicate",
    "row",
    "vocab",
]


def vocab(*names: str, optional: bool = False) -> Row:
    """Split embeddings over their rows (vocabulary)."""
    return SwapRow(text=_text("vocab", *names), optional=optional, names=names, target=VocabEmbedding)


def col(*names: str, gather_output: bool = False, optional: bool = False) -> Row:
    """Split linears over their output features; each enters by itself, those called with one tensor share the enter.

    Prefer `region` wherever a module boundary marks the entry: it overlaps the communication.
    """
    options = (("gather_output", gather_output),)
    text = _text("col", *names, gather_output=gather_output or None)
    return SwapRow(text=text, optional=optional, names=names, target=ColumnLinear, options=options)


def row(*names: str, parallel_input: bool = True, optional: bool = False) -> Row:
    """Split linears over their input features; the outputs are summed over the ranks."""
    options = (("parallel_input", parallel_input),)
    text = _text("row", *names, parallel_input=None if parallel_input else False)
    return SwapRow(text=text, optional=optional, names=names, target=RowLinear, options=options)


def head(*names: str, optional: bool = False) -> Row:
    """Split output heads over the vocabulary; the logits are gathered."""
    return HeadRow(text=_text("head", *names), optional=optional, names=names)


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
    """Replicated modules that local heads read (norms on queries and keys): their gradients are summed."""
    options = (("partial", True),)
    return SwapRow(text=_text("partial", *names), optional=optional, names=names, target=Replicated, options=options)


def region(
    *,
    col: str | tuple[str, ...],
    row: str,
    enter: str | None = None,
    arg: str | None = None,
    kv: str | tuple[str, ...] = (),
    unit: Literal["column", "head"] = "column",
    optional: bool = False,
) -> Row:
    """A pair of column linears and a row linear between which activations are split.

    Args:
        col: linears split over their output features.
        row: the linear, split over its input features, that ends the region.
        enter: the module whose call enters the region, which must not contain the residual connection; ``None`` lets
            the column linears enter (one alone at its own call, several by the identity of their input).
        arg: the entering argument of that module's ``forward``; by default the first.
        kv: key and value linears. With fewer KV heads than ranks, neighbouring ranks share copies of a head.
        unit: what must stay whole: single columns, or attention heads as the policy's ``Heads`` check counts them.
        optional: the region may be absent.
    """
    text = _text(
        "region", enter=enter, arg=arg, col=col, kv=kv or None, row=row, unit=None if unit == "column" else unit
    )
    return RegionRow(
        text=text, optional=optional, enter=enter, arg=arg, col=_tuple(col), kv=_tuple(kv), row=row, unit=unit
    )


def attribute(name: str, value: Any, *, optional: bool = False, literal: bool = False) -> Row:
    """Set an attribute (dots reach into submodules) to what one rank needs.

    Args:
        name: the attribute; it must exist.
        value: the new value, or a function of the `HeadCounts` such as `local_heads`.
        optional: the submodule may be absent.
        literal: a function is the value itself.
    """
    shown = value.__name__ if inspect.isfunction(value) else repr(value)
    text = f"attribute({name!r}, {shown})"
    return AttributeRow(text=text, optional=optional, name=name, value=value, literal=literal)


def outputs(*, attentions: Literal["heads"] | None = None, optional: bool = False) -> Row:
    """Make captured outputs of the module that collects them whole again.

    Args:
        attentions: ``"heads"`` if attention weights (B, heads, S, S) hold this rank's heads only.
        optional: the module may be absent.
    """
    return OutputsRow(text=_text("outputs", attentions=attentions), optional=optional, attentions=attentions)


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
