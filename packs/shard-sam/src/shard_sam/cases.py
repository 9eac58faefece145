"""Tiny SAMs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, **options: Any) -> Any:
    """Return a tiny SAM of the class ``name``: one block attends within windows, the other everywhere."""
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "output_channels": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "image_size": 24,
        "patch_size": 4,
        "window_size": 4,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
        "mlp_dim": 37,  # divides by no number of ranks
        "attention_dropout": dropout,
        **options,
    }
    settings = vision
    if name == "SamModel":
        attention = {"attn_implementation": vision.pop("attn_implementation", "eager")}
        settings = {
            "vision_config": vision,
            "prompt_encoder_config": {"hidden_size": 32, "image_size": 24, "patch_size": 4},
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 37,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 32,
            },
            **attention,
        }
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    if name == "SamModel":
        # Read where no masks are given, as here they are: without a gradient it would have no state in an optimizer.
        model.prompt_encoder.no_mask_embed.requires_grad_(False)
    return model


def inputs(model: Any, seed: int) -> dict[str, Any]:
    """Return images (2, 3, 24, 24), and points, a box and a mask for each where the model takes prompts."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(2, 3, 24, 24, generator=generator, dtype=torch.float64)}
    if type(model).__name__ == "SamModel":
        batch["input_points"] = 24 * torch.rand(2, 1, 3, 2, generator=generator, dtype=torch.float64)
        batch["input_labels"] = torch.tensor([[[0, 1, -1]], [[1, 0, -10]]])
        batch["input_masks"] = torch.randn(2, 1, 24, 24, generator=generator, dtype=torch.float64)
        batch["input_boxes"] = 24 * torch.rand(2, 1, 4, generator=generator, dtype=torch.float64)
    return batch


def masks_loss(out: Any) -> Tensor:
    """Return a loss of masks and of their scores: a weighted mean of each."""
    return weighted_mean(out.pred_masks, out.iou_scores)


def cases() -> list[Case]:
    """Return a case for each class."""
    shared: dict[str, Any] = {
        "inputs": inputs,
        "layers": "vision_encoder.layers",
        "collectives": (2, 4),  # each block has two tables of relative positions
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 1},),
        # Rows and heads are one dim of these masks, which the kit cannot put together: see tests/test_sam.py.
        "supports": Supports(dropout=False),
    }
    return [
        Case(
            name="masks",
            build=partial(build, "SamModel"),
            loss=masks_loss,
            outputs=("pred_masks", "iou_scores"),
            sharded=("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2", "q_proj", "out_proj"),
            **shared,
        ),
        Case(
            name="vision",
            build=partial(build, "SamVisionModel"),
            loss=hidden_loss,
            outputs=("last_hidden_state",),
            sharded=("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2"),
            **shared,
        ),
    ]
