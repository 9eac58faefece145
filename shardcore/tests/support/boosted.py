"""What the tests of the Booster train on, and by."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from needs import PIPELINES
from tiny import batch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["LENGTH", "STEPS", "batches", "criterion", "for_each", "labelled", "whole"]

STEPS, ROWS, LENGTH = 4, 8, 6


def for_each(*options: dict[str, Any]) -> pytest.MarkDecorator:
    """Repeat a test for the options of several plugins, where this torch can do what they say."""
    marked = [pytest.param(given, marks=[PIPELINES] if "pp_size" in given else []) for given in options]
    return pytest.mark.parametrize("options", marked, ids=str)


def batches(replica: int = 0) -> Any:
    """Yield batches without labels: the criterion has its own, the next token."""
    for step in range(STEPS):
        yield {"ids": batch(10 * step + replica, ROWS, LENGTH)}


def criterion(logits: Tensor, inputs: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["ids"][:, 1:].flatten())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def labelled(seed: int, rows: int) -> dict[str, Tensor]:
    """Return a batch with labels, of which those of the first and of the last rows do not count."""
    labels = batch(seed + 1, rows, LENGTH)
    labels[:2] = -100
    labels[-1:] = -100
    return {"ids": batch(seed, rows, LENGTH), "labels": labels}
