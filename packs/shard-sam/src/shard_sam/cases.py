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


def build_second(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny SAM 2 of the class ``name``: three stages, the first of which has one head, without dropout."""
    stages: dict[str, Any] = {
        "hidden_size": 12,
        "num_query_pool_stages": 2,
        "blocks_per_stage": [1, 1, 2],
        "embed_dim_per_stage": [12, 24, 48],
        "num_attention_heads_per_stage": [1, 2, 4],
        "window_size_per_stage": [8, 4, 2],
        "global_attention_blocks": [3],
        "mlp_ratio": 1.5,
        **options,
    }
    vision: dict[str, Any] = {
        "backbone_config": {"model_type": "sam2_hiera_det_model", **stages},
        "backbone_channel_list": [48, 24, 12],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 32,
        "fpn_top_down_levels": [1, 2],
    }
    decoder = {"hidden_size": 32, "mlp_dim": 37, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
    settings: dict[str, dict[str, Any]] = {
        "Sam2HieraDetModel": stages,
        "Sam2VisionModel": vision,
        "Sam2Model": {
            "vision_config": {"model_type": "sam2_vision_model", **vision},
            "prompt_encoder_config": {"hidden_size": 32, "image_size": 64},
            "mask_decoder_config": decoder,
        },
    }
    model = tiny(getattr(transformers, name), seed=seed, **settings[name])
    if name == "Sam2Model":
        model.prompt_encoder.no_mask_embed.requires_grad_(False)  # as above
    return model


def second_inputs(model: Any, seed: int) -> dict[str, Any]:
    """Return images (2, 3, 64, 64), and points, a box and a mask for each where the model takes prompts."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator, dtype=torch.float64)}
    if type(model).__name__ == "Sam2Model":
        batch["input_points"] = 64 * torch.rand(2, 1, 3, 2, generator=generator, dtype=torch.float64)
        batch["input_labels"] = torch.tensor([[[0, 1, -1]], [[1, 0, -10]]])
        batch["input_masks"] = torch.randn(2, 1, 16, 16, generator=generator, dtype=torch.float64)
        batch["input_boxes"] = 64 * torch.rand(2, 1, 4, generator=generator, dtype=torch.float64)
    return batch


def features_loss(out: Any) -> Tensor:
    """Return a loss of an encoder: a weighted mean of the features of all stages."""
    maps = out.fpn_hidden_states if "fpn_hidden_states" in out else out.intermediate_hidden_states
    return weighted_mean(out.last_hidden_state, *maps)


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
    objects = (out.object_score_logits,) if "object_score_logits" in out else ()
    return weighted_mean(out.pred_masks, out.iou_scores, *objects)


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
        *_second(),
    ]


def _second() -> list[Case]:
    def case(name: str, kind: str, around: str, **fields: Any) -> Case:
        return Case(
            name=f"second_{name}",
            build=partial(build_second, kind),
            inputs=second_inputs,
            layers=f"{around}blocks",
            sharded=("attn.qkv", "attn.proj", "mlp.proj_in", *fields.pop("sharded", ())),
            collectives=(2, 3),  # the third is that of the bias of queries, keys and values together
            whole=(f"{around}blocks.0.attn.", "blocks.1.proj", "blocks.2.proj", "blocks.1.attn."),
            refuses=({"num_attention_heads_per_stage": [1, 1, 1]},),
            supports=Supports(dropout=False, checkpointing=False, pipeline=False),
            **fields,
        )

    return [
        case(
            "masks",
            "Sam2Model",
            "vision_encoder.backbone.",
            loss=masks_loss,
            outputs=("pred_masks", "iou_scores"),
            sharded=("self_attn.q_proj", "cross_attn_token_to_image.o_proj"),
        ),
        case("vision", "Sam2VisionModel", "backbone.", loss=features_loss, outputs=("last_hidden_state",)),
        case("stages", "Sam2HieraDetModel", "", loss=features_loss, outputs=("last_hidden_state",)),
    ]
