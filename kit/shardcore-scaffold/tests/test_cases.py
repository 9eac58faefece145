"""The arguments of a case, as a program writes them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")  # which the command that drafts packs needs

from shardcore_scaffold.cases import _value


def _drawn(name: str, value: torch.Tensor, seed: int) -> torch.Tensor:
    found: torch.Tensor = eval(_value(name, value), {"torch": torch, "generator": torch.Generator().manual_seed(seed)})
    assert found.shape == value.shape
    return found


def test_words_are_drawn_and_the_places_of_images_stay() -> None:
    ids = torch.tensor([[30, 3, 3, 90, 60], [50, 3, 3, 40, 70]])
    one, other = (_drawn("decoder_input_ids", ids, seed) for seed in (1, 2))
    for found in (one, other):
        assert torch.equal(found == 3, ids == 3)
        assert found[ids != 3].min() >= 30
        assert found.max() <= 90
    assert not torch.equal(one, other)
    assert _drawn("labels", torch.tensor([0, 2, 1]), 1).max() <= 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", torch.ones(2, 3, dtype=torch.long)),
        ("image_grid_thw", torch.tensor([[1, 4, 6]])),
        ("bool_masked_pos", torch.tensor([[True, False]])),
        ("bbox", torch.tensor([[0.25, 0.5]], dtype=torch.float64)),
    ],
)
def test_masks_grids_and_boxes_stay(name: str, value: torch.Tensor) -> None:
    found = _drawn(name, value, 1)
    assert torch.equal(found, value)
    assert found.dtype == value.dtype


def test_other_numbers_are_drawn() -> None:
    assert _drawn("pixel_values", torch.zeros(2, 3), 1).dtype == torch.float64
    assert _value("return_dict", True) == "True"
