"""What the kit cannot ask of detectors: labels, which are lists, and the loss that matches them with what is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shard_detr.cases import build, inputs
from shardcore_testing import no_float32_islands
from shardcore_testing.pack import shard_by
from shardcore_testing.parity import assert_close, assert_same_gradients

for needed in ("PIL", "scipy"):
    pytest.importorskip(needed, reason="without it transformers has no loss of boxes")

PLUGIN = "shard_detr.plugin"
#: Queries of known objects, without noise: a sharded model draws other numbers.
_DENOISED = {"num_denoising": 6, "label_noise_ratio": 0.0, "box_noise_scale": 0.0}
#: Whole losses, of all layers of the decoder, and of places that are proposed.
DETECTORS: dict[str, dict[str, Any]] = {
    "DetrForObjectDetection": {"auxiliary_loss": True},
    "DetrForSegmentation": {},
    "ConditionalDetrForObjectDetection": {"auxiliary_loss": True},
    "ConditionalDetrForSegmentation": {},
    "DeformableDetrForObjectDetection": {"auxiliary_loss": True, "with_box_refine": True, "two_stage": True},
    "RTDetrForObjectDetection": _DENOISED,
    "RTDetrV2ForObjectDetection": _DENOISED,
    "TableTransformerForObjectDetection": {"auxiliary_loss": True},
}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_loss_of_labels(pool, name):
    pool.run(_learns, name, world=2)


@no_float32_islands()
def _learns(name: str) -> None:
    reference = build(name, **DETECTORS[name]).train()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    batch = inputs(reference, 0)
    losses = []
    torch.set_default_dtype(torch.float64)  # that of the weights of classes, which a loss makes
    try:
        for model in (reference, sharded):
            losses.append(model(**batch, labels=_labels(batch["pixel_values"].shape[-1])).loss)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(*losses, "loss")
    for loss in losses:
        loss.backward()
    assert_same_gradients(reference, sharded)


def _labels(size: int) -> list[dict[str, torch.Tensor]]:
    """Return the objects of three images, one of which has none."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for objects in (2, 1, 0):
        boxes = 0.2 + 0.3 * torch.rand(objects, 4, generator=generator, dtype=torch.float64)
        masks = torch.randint(0, 2, (objects, size, size), generator=generator).double()
        classes = torch.randint(0, 3, (objects,), generator=generator)
        found.append({"class_labels": classes, "boxes": boxes, "masks": masks})
    return found
