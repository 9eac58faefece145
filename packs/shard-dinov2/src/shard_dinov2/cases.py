"""Tiny DINOv2s and DINOv3s for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_SIZE, _PATCH = 12, 2
_CAPTURED = ("attentions", "hidden_states")
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "drop_path_rate")
#: A gated MLP has two projections in one linear.
_HAS_GATED = Version(torch.__version__) >= Version("2.12")
#: DINOv3 as the pack serves it: with a list of blocks in an encoder.
_HAS_THIRD = Version(transformers.__version__) >= Version("5.10.0rc0")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``: 36 patches, the class token and maybe registers, two blocks."""
    settings: dict[str, Any] = {
        "image_size": _SIZE,
        "patch_size": _PATCH,
        "hidden_size": 44,  # and so many features of the MLP: three ranks do not divide them
        "mlp_ratio": 1,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 3,
        "attn_implementation": "eager",
        **dict.fromkeys(_DROPOUTS, dropout),
        **({} if name.startswith("Dinov2") and "Registers" not in name else {"num_register_tokens": 3}),
        # Each dim of the image rotates a quarter of a head; a scale would be drawn in training.
        **({"hidden_size": 48, "pos_embed_rescale": None} if name.startswith("DINOv3") else {}),
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int, *, masked: bool = False) -> dict[str, Tensor]:
    """Return three images with what the head of ``model`` learns from; ``masked`` hides some patches."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(3, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64)}
    if type(model).__name__.endswith("Classification"):
        batch["labels"] = torch.randint(0, 3, (3,), generator=generator)
    if masked:
        batch["bool_masked_pos"] = torch.rand(3, (_SIZE // _PATCH) ** 2, generator=generator) < 0.4
    return batch


#: Of what estimates depth: features of two blocks, one made larger and one smaller.
_DEPTH: dict[str, Any] = {
    "patch_size": _PATCH,
    "reassemble_hidden_size": 44,
    "reassemble_factors": [2, 0.5],
    "neck_hidden_sizes": [6, 10],
    "fusion_hidden_size": 8,
    "head_hidden_size": 4,
}
#: What no call of it reads.
_UNREAD = ("mask_token", "fusion_stage.layers.0.residual_layer1")


def build_depth(name: str, *, dropout: float = 0.0, seed: int = 0, kind: str = "metric", **options: Any) -> Any:
    """Return a tiny model of the class ``name`` that estimates depth, measured or relative, behind a DINOv2."""
    backbone: dict[str, Any] = {
        "model_type": "dinov2",
        "image_size": _SIZE,
        "patch_size": _PATCH,
        "hidden_size": 44,
        "mlp_ratio": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "out_features": ["stage1", "stage2"],
        "reshape_hidden_states": False,
        **dict.fromkeys(_DROPOUTS, dropout),
        **options,
    }
    # The model itself has no attention, and takes no other than this.
    attention = {"": "eager", "backbone_config": backbone.pop("attn_implementation", "eager")}
    settings = {
        **_DEPTH,
        "backbone_config": backbone,
        "depth_estimation_type": kind,
        "attn_implementation": attention,
    }
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    for parameter, tensor in model.named_parameters():
        tensor.requires_grad_(not any(part in parameter for part in _UNREAD))
    return model


def depth_inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return three images, with depths of a part of their pixels where ``model`` goes by them."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(3, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64)}
    if "Prompt" in type(model).__name__:
        batch["prompt_depth"] = 1 + torch.rand(3, 1, 4, 4, generator=generator, dtype=torch.float64)
    return batch


def depth_loss(out: Any) -> Tensor:
    """Return a loss of depths: a weighted mean of them."""
    return weighted_mean(out.predicted_depth)


def maps_loss(out: Any) -> Tensor:
    """Return a loss of a backbone: a weighted mean of the features of each stage."""
    return weighted_mean(*out.feature_maps)


def _case(name: str, kind: str, *, around: str = "", blocks: str = "encoder.layer", **fields: Any) -> Case:
    sequence = not kind.endswith("Backbone")
    context = sequence and not kind.startswith("DINOv3")
    settings: dict[str, Any] = {
        "inputs": inputs,
        "layers": around + blocks,
        "sharded": ("attention.", "mlp."),
        "supports": Supports(tensor_parallel=(1, 2, 3, 4), sequence=sequence, context=context, captured=_CAPTURED),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("with_", {})), **settings)


_STATES: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state", "pooler_output")}
_MAPS: dict[str, Any] = {"loss": maps_loss, "with_": {"out_features": ["stage1", "stage2"]}}


def _second(family: str, prefix: str, around: str) -> list[Case]:
    ways = {"attn_implementation": ("eager", "sdpa"), "qkv_bias": (True, False)}
    labels: dict[str, Any] = {"around": around, "outputs": ("logits",)}
    classifier = f"{family}ForImageClassification"
    return [
        _case(f"{prefix}image_classification", classifier, options=ways, **labels),
        *([_case(f"{prefix}gated", classifier, with_={"use_swiglu_ffn": True}, **labels)] if _HAS_GATED else []),
        _case(f"{prefix}masked", f"{family}Model", **_STATES, inputs=partial(inputs, masked=True)),
        _case(f"{prefix}backbone", f"{family}Backbone", **_MAPS),
    ]


def _third() -> list[Case]:
    ways = {"attn_implementation": ("eager", "sdpa"), "use_gated_mlp": (False, True)}
    masked = partial(inputs, masked=True)
    # One norm for the features of all stages, which earlier ones have.
    features = Supports(tensor_parallel=(1, 2, 3, 4), captured=_CAPTURED, pipeline=False)
    return [
        _case("dinov3_masked", "DINOv3ViTModel", blocks="model.layer", **_STATES, inputs=masked, options=ways),
        _case("dinov3_backbone", "DINOv3ViTBackbone", blocks="model.layer", **_MAPS, supports=features),
    ]


def _depth() -> list[Case]:
    return [
        Case(
            name=name,
            build=partial(build_depth, kind),
            inputs=depth_inputs,
            loss=depth_loss,
            outputs=("predicted_depth",),
            options={"attn_implementation": ("eager", "sdpa"), "kind": ("metric", "relative")},
            layers="backbone.encoder.layer",
            sharded=("attention.", "mlp."),
            supports=Supports(tensor_parallel=(1, 2, 3, 4), captured=_CAPTURED),
        )
        for name, kind in (
            ("depth", "DepthAnythingForDepthEstimation"),
            ("prompted_depth", "PromptDepthAnythingForDepthEstimation"),
        )
    ]


def cases() -> list[Case]:
    """Return a case for every class, and for both kinds of MLP."""
    return [
        *_second("Dinov2", "dinov2_", "dinov2."),
        *_second("Dinov2WithRegisters", "registers_", "dinov2_with_registers."),
        *(_third() if _HAS_THIRD else []),
        *_depth(),
    ]
