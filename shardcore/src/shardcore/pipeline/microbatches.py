"""Batches in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from shardcore.agree.fingerprint import checksum
from shardcore.errors import ConfigError

#: The label that does not count.
IGNORED = -100

# Arguments that have no rows, though they may have as many entries as there are rows.
_OF_NO_ROWS = ("cache_position", "logits_to_keep")


def rows_of(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch: the first dim of its first tensor that has dims."""
    for leaf in tree_flatten(dict(batch))[0]:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.size(0)
    raise ConfigError(
        f"a batch of {', '.join(batch) or 'nothing'} has no tensor with rows; pass tensors of shape (B, ...)"
    )


def micro_batches(
    batch: Mapping[str, Any], *, number: int | None = None, size: int | None = None
) -> list[dict[str, Any]]:
    """Return the micro-batches of a batch, in the order of its rows: equally many each, the last one what remains.

    Args:
        batch: arguments of a call. Tensors of as many rows as the first one are divided, anything else goes to all, as
            ``cache_position`` and ``logits_to_keep`` do in any case.
        number: how many micro-batches; fewer if there are not as many rows, or too few for the last one. Or
        size: rows of each.

    Raises:
        ConfigError: there are no rows.
    """
    rows = rows_of(batch)
    each = rows_of_each(rows, number=number, size=size)

    of_rows = {name: value for name, value in batch.items() if name not in _OF_NO_ROWS}

    def part(start: int) -> dict[str, Any]:
        divided: dict[str, Any] = tree_map_only(
            Tensor, lambda t: t[start : start + each] if t.ndim and t.size(0) == rows else t, of_rows
        )
        return {name: divided.get(name, value) for name, value in batch.items()}

    return [part(start) for start in range(0, rows, each)]


def rows_of_each(rows: int, *, number: int | None = None, size: int | None = None) -> int:
    """Return how many rows each micro-batch of ``rows`` has, all but the last one; see `micro_batches`."""
    if not rows:
        raise ConfigError("a batch without rows has no micro-batches; pass at least one row")
    return size or -(-rows // (number or 1))


def shapes_of(batch: Mapping[str, Any]) -> str:
    """Return in words what a script depends on: names, shapes and dtypes of tensors, and all other values."""
    leaves, tree = tree_flatten(dict(batch))
    told = [f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)[:80] for leaf in leaves]
    return f"{tree} {told}"


def contents_of(batch: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return checksums of the tensors of a batch, as what ranks compare."""
    leaves = tree_flatten(dict(batch))[0]
    return [(f"tensor {n} of the batch", checksum(leaf)) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]


def with_labels(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments in which labels count, for a micro-batch that has no share in the loss: a mean over none is NaN.

    Those that are there may not count: the first label of a row does not in a loss of later tokens.
    """
    labels = arguments.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return arguments
    return {**arguments, "labels": torch.zeros_like(labels)}
