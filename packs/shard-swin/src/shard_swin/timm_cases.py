"""Tiny Swins and MViTs of timm for the conformance kit."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardcore_testing import Case, Supports, randomized, weighted_mean

_SIZE = 12
_DROPOUTS = ("drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")


def build_swin(kind: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> nn.Module:
    """Return a Swin of timm: two stages, the first with windows that shift, in float64."""
    module, _, name = kind.partition(".")
    settings: dict[str, Any] = {
        "img_size": _SIZE,
        "patch_size": 2,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (4, 8),
        "window_size": 3,
        "mlp_ratio": 37 / 24,  # divides by no number of ranks
        "num_classes": 5,
        **dict.fromkeys(_DROPOUTS, dropout),
        **options,
    }
    model = randomized(getattr(importlib.import_module(f"timm.models.{module}"), name)(**settings), seed)
    for path, child in model.named_modules():
        if path.endswith("meta_mlp.drop1"):  # which no option sets
            child.p = dropout
    return model


def build_mvit(*, dropout: float = 0.0, seed: int = 0, **options: Any) -> nn.Module:
    """Return an MViT of timm: two stages of two blocks, the second of which pools its queries, in float64."""
    library = importlib.import_module("timm.models.mvitv2")
    settings: dict[str, Any] = {
        "depths": (2, 2),
        "embed_dim": 24,
        "num_heads": (4, 8),
        "mlp_ratio": 37 / 24,
        "stride_q": ((1, 1), (2, 2)),
        "stride_kv_adaptive": (2, 2),
        "patch_kernel": (2, 2),
        "patch_stride": (2, 2),
        "patch_padding": (0, 0),
        **options,
    }
    of_model = {"img_size": _SIZE, "num_classes": 5, "drop_rate": dropout, "drop_path_rate": dropout}
    return randomized(library.MultiScaleVit(library.MultiScaleVitCfg(**settings), **of_model), seed)


def _inputs(model: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(3, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64)}


def _loss(out: Tensor) -> Tensor:
    return weighted_mean(out)


_V1, _V2, _CR = (
    f"swin_transformer{suffix}.SwinTransformer{name}" for suffix, name in (("", ""), ("_v2", "V2"), ("_v2_cr", "V2Cr"))
)
#: By name: what builds the model, the list of its stages, and the collectives of a block.
_KINDS: dict[str, tuple[Any, str, tuple[int, int]]] = {
    "swin": (partial(build_swin, _V1), "layers", (2, 3)),
    "swin_without_biases": (partial(build_swin, _V1, qkv_bias=False), "layers", (2, 2)),
    "swinv2": (partial(build_swin, _V2), "layers", (2, 3)),
    "swinv2_pretrained": (partial(build_swin, _V2, pretrained_window_sizes=(4, 4), qkv_bias=False), "layers", (2, 3)),
    "swinv2_cr": (partial(build_swin, _CR, extra_norm_period=2), "stages", (2, 4)),
    "mvit": (build_mvit, "stages", (2, 3)),
    "mvit_narrow": (partial(build_mvit, expand_attn=False, use_cls_token=True, use_abs_pos=True), "stages", (2, 3)),
    "mvit_max": (partial(build_mvit, mode="max", rel_pos_type="", residual_pooling=False), "stages", (2, 3)),
}


def cases() -> list[Case]:
    """Return a case for each class, and stages of which the ranks divide the heads of one."""

    def case(name: str, build: Any, stages: str, collectives: tuple[int, int], **fields: Any) -> Case:
        settings: dict[str, Any] = {
            "layers": f"{stages}.1.blocks",
            "sharded": ("attn.",),
            "whole": ("downsample.reduction", "shortcut_proj"),
            "supports": Supports(
                tensor_parallel=(1, 2, 4), checkpointing=False, save_pretrained=False, flash_attention=False
            ),
            "refuses": ({"pool_first": True},) if name == "mvit" else (),
            **fields,
        }
        return Case(name=f"timm_{name}", build=build, inputs=_inputs, loss=_loss, collectives=collectives, **settings)

    uneven = Supports(checkpointing=False, save_pretrained=False, flash_attention=False, tensor_parallel=(1, 2, 3, 4))
    return [
        *(case(name, *kind) for name, kind in _KINDS.items()),
        case(
            "swin_uneven",
            partial(build_swin, _V1, num_heads=(3, 12)),
            "layers",
            (2, 3),
            supports=uneven,
            whole=("downsample.reduction", "attn."),
        ),
    ]
