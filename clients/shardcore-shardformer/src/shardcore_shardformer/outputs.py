"""The outputs of micro-batches as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def joined(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the outputs of all micro-batches of one batch as its output.

    Tensors whose first dim is that of the rows of a micro-batch are put together; of anything else, such as losses,
    there is a list.

    Args:
        outputs: in the order of the micro-batches.
        rows: how many rows each of them has.
    """
    leaves = [tree_flatten(out)[0] for out in outputs]
    tree = tree_flatten(outputs[0])[1]
    merged = [
        torch.cat(list(values)) if _by_rows(values, rows) else list(values) for values in zip(*leaves, strict=True)
    ]
    return tree_unflatten(merged, tree)


def _by_rows(values: Sequence[Any], rows: Sequence[int]) -> bool:
    return all(
        isinstance(value, Tensor) and value.ndim > 0 and value.size(0) == count
        for value, count in zip(values, rows, strict=True)
    )
