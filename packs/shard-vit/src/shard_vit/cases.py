"""Tiny vision transformers, for the conformance kit and for the tests of this pack."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from shardcore_testing import Case, Supports, hidden_loss, weighted_mean

#: Of the families that are built like ViT, the layout that is served.
_HAS_RELATIVES = Version(transformers.__version__) >= Version("5.9.0rc0")
#: What becomes of the keyword ``dropout``.
_VIT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
#: Of a masked autoencoder: 11 tokens go through the encoder, and 37 through the decoder, which has heads of its own.
_MAE: dict[str, Any] = {
    "mask_ratio": 0.7,
    "decoder_hidden_size": 32,
    "decoder_num_attention_heads": 8,
    "decoder_num_hidden_layers": 2,
    "decoder_intermediate_size": 41,
}
#: Of DPT: features of both blocks, one made larger and one smaller.
_DPT: dict[str, Any] = {
    "backbone_out_indices": [0, 1],
    "reassemble_factors": [2, 0.5],
    "neck_hidden_sizes": [6, 10],
    "fusion_hidden_size": 8,
    "backbone_config": None,
}
#: What no head of it reads.
_UNREAD = ("fusion_stage.layers.0.residual_layer1", "dpt.layernorm", "mask_token")
#: Of YOLOS: 24 patches, the class token, and 4 tokens that detect.
_YOLOS: dict[str, Any] = {"image_size": [16, 24], "num_detection_tokens": 4}
_OWN = {"DPT": _DPT, "ViTMAE": _MAE, "Yolos": _YOLOS}
_TIMM_DROPOUTS = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter, biases too, from N(0, 0.2)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def build_vit(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return the model of transformers with this class name: 36 patches and maybe tokens, two layers."""
    settings: dict[str, Any] = {
        "image_size": 24,
        "patch_size": 4,
        "encoder_stride": 4,
        "hidden_size": 48,
        "intermediate_size": 37,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 10,
        "attn_implementation": "eager",
        **dict.fromkeys(_VIT_DROPOUTS, dropout),
        **next((own for family, own in _OWN.items() if name.startswith(family)), {}),
        **options,
    }
    model_class = getattr(transformers, name)
    model: Any = randomize(model_class(model_class.config_class(**settings)), seed).to(torch.float64)
    if name.startswith("DPTFor"):
        for parameter, tensor in model.named_parameters():
            tensor.requires_grad_(not any(part in parameter for part in _UNREAD))
    if name.endswith("DepthEstimation"):
        with torch.no_grad():
            model.head.head[4].bias.fill_(1.0)  # depths are cut off at 0, below which nothing would be learned
    return model


def build_timm(
    kind: str = "vision_transformer.VisionTransformer", *, dropout: float = 0.0, seed: int = 0, **options: Any
) -> Any:
    """Return a vision transformer of timm: 16 patches and the class token, two blocks."""
    module, _, name = kind.partition(".")
    native = getattr(importlib.import_module(f"timm.models.{module}"), name)
    settings: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 37 / 48,  # 37 hidden features divide by no number of ranks
        "num_classes": 10,
        **dict.fromkeys(_TIMM_DROPOUTS, dropout),
        **options,
    }
    return randomize(native(**settings), seed).to(torch.float64)


def images(size: int, seed: int, rows: int = 3) -> Tensor:
    """Return random images with three channels."""
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _vit_inputs(model: Any, seed: int) -> dict[str, Tensor]:
    inputs = {"pixel_values": images(model.config.image_size, seed)}
    generator = torch.Generator().manual_seed(seed)
    patches = (model.config.image_size // model.config.patch_size) ** 2
    if type(model).__name__.removeprefix("FSDP").endswith("Classification"):
        inputs["labels"] = torch.randint(0, model.config.num_labels, (3,), generator=generator)
    elif "MAE" in type(model).__name__:
        inputs["noise"] = torch.rand(3, patches, generator=generator)  # the patches with the most of it are hidden
    elif "Masked" in type(model).__name__:
        inputs["bool_masked_pos"] = torch.rand(3, patches, generator=generator) < 0.4
    return inputs


def _yolos_inputs(model: Any, seed: int) -> dict[str, Tensor]:
    return {"pixel_values": images(24, seed)[:, :, :16]}


def _timm_inputs(model: Any, seed: int) -> dict[str, Tensor]:
    return {"x": images(model.patch_embed.img_size[0], seed)}


def _loss_of_logits(out: Tensor) -> Tensor:
    return weighted_mean(out)


def _loss_of_both(out: Any) -> Tensor:
    return weighted_mean(out.cls_logits, out.distillation_logits)


def _loss_of_depths(out: Any) -> Tensor:
    return weighted_mean(out.predicted_depth)


def _loss_of_boxes(out: Any) -> Tensor:
    return weighted_mean(out.logits, out.pred_boxes)


def cases() -> list[Case]:
    """Return the models of transformers, and those of timm where it is installed."""
    vit: dict[str, Any] = {
        "inputs": _vit_inputs,
        "options": {"attn_implementation": ("eager", "sdpa"), "qkv_bias": (True, False)},
        "sharded": ("attention.",),
        "supports": Supports(sequence=True, context=True, captured=("attentions", "hidden_states")),
    }
    masked = replace(vit["supports"], micro_batches=False)  # a mean over masked patches
    states: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state", "pooler_output")}
    unpooled: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state",)}
    logits: dict[str, Any] = {"outputs": ("logits",)}
    boxes: dict[str, Any] = {
        "inputs": _yolos_inputs,
        "loss": _loss_of_boxes,
        "outputs": ("logits", "last_hidden_state"),
    }
    between = Supports(captured=("attentions", "hidden_states"))  # positions between blocks are those of all tokens
    pixels: dict[str, Any] = {"outputs": ("reconstruction",), "supports": masked}
    # The loss goes by the mask, which is made where the first patches are.
    drawn: dict[str, Any] = {
        "layers": "decoder.decoder_layers",
        "outputs": ("logits", "mask"),
        "supports": replace(vit["supports"], pipeline=False),
    }
    several = replace(vit["supports"], context=False)  # the head reads all tokens of several blocks
    # Attention that is not in transformers' table is not divided over cp.
    alone = {"inputs": _yolos_inputs, "with_": {"use_mid_position_embeddings": False}, "supports": several}
    refused = ({"use_batch_norm_in_fusion_residual": True},)
    depths: dict[str, Any] = {"loss": _loss_of_depths, "outputs": ("predicted_depth",)}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "model": ("ViTModel", states),
        "image_classification": ("ViTForImageClassification", logits),
        "masked_image_modeling": ("ViTForMaskedImageModeling", pixels),
    }
    if _HAS_RELATIVES:
        kinds |= {
            "deit_model": ("DeiTModel", states),
            "deit_image_classification": ("DeiTForImageClassification", logits),
            "deit_with_teacher": ("DeiTForImageClassificationWithTeacher", {"loss": _loss_of_both, **logits}),
            "deit_masked_image_modeling": ("DeiTForMaskedImageModeling", pixels),
            "ijepa_model": ("IJepaModel", unpooled),
            "ijepa_image_classification": ("IJepaForImageClassification", logits),
            "mae_pretraining": ("ViTMAEForPreTraining", drawn),
            "mae_model": ("ViTMAEModel", unpooled),
            "dpt_depth": ("DPTForDepthEstimation", {**depths, "supports": several, "refuses": refused}),
            "dpt_model": ("DPTModel", {**states, "supports": several}),
            "yolos_detection": ("YolosForObjectDetection", {**boxes, "supports": between}),
            "yolos_model": (
                "YolosModel",
                {**states, **alone},
            ),
            "msn_model": ("ViTMSNModel", unpooled),
            "msn_image_classification": ("ViTMSNForImageClassification", logits),
        }
    if _HAS_RELATIVES and importlib.util.find_spec("shard_dinov2"):
        kinds["dpt_backbone"] = ("DPTForDepthEstimation", {**depths, **_behind_a_backbone()})
    found = [
        Case(name=name, build=functools.partial(build_vit, kind, **fields.pop("with_", {})), **{**vit, **fields})
        for name, (kind, fields) in kinds.items()
    ]
    return found + (_timm_cases() if importlib.util.find_spec("timm") else [])


def _behind_a_backbone() -> dict[str, Any]:
    """Return what is other in a DPT behind a DINOv2, which is left to its own pack."""
    backbone = {
        "model_type": "dinov2",
        "image_size": 24,
        "patch_size": 4,
        "hidden_size": 48,
        "mlp_ratio": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "out_features": ["stage1", "stage2"],
        "reshape_hidden_states": False,
    }
    sizes = (1, 2, 3, 4)
    return {
        "with_": {"backbone_config": backbone},
        "options": {"attn_implementation": ("eager", "sdpa")},
        "supports": Supports(tensor_parallel=sizes, captured=("attentions", "hidden_states"), dropout=False),
    }


_EVA, _BEIT = "eva.Eva", "beit.Beit"
#: Variants of timm's models, by name, and the options that make them.
TIMM_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"kind": "deit.VisionTransformerDistilled"},
    "registers": {  # pooled by the mean, normalised after it
        "qk_norm": True,
        "init_values": 0.1,
        "reg_tokens": 2,
        "class_token": False,
        "global_pool": "avg",
        "pre_norm": True,
    },
    "pooled_by_attention": {"global_pool": "map", "qkv_bias": False, "proj_bias": False, "class_token": False},
    "gated": {"mlp_layer": "SwiGLU"},
    "gated_in_one": {"mlp_layer": "SwiGLUPacked", "mlp_ratio": 80 / 48},
    "norms_after": {"block_fn": "ResPostBlock"},
    "normed_inside": {"scale_attn_norm": True, "scale_mlp_norm": True},  # BEiT-3
    "eva": {"kind": _EVA, "init_values": 0.1},
    "eva02": {  # norms inside, projections apart, rotary positions
        "kind": _EVA,
        "qkv_fused": False,
        "swiglu_mlp": True,
        "scale_mlp": True,
        "scale_attn_inner": True,
        "use_rot_pos_emb": True,
    },
    "eva_gated_in_one": {"kind": _EVA, "swiglu_mlp": True, "qkv_bias": False, "use_post_norm": True},
    "dinov3": {
        "kind": _EVA,
        "attn_type": "rope",
        "use_rot_pos_emb": True,
        "rope_type": "dinov3",
        "rope_rotate_half": True,
        "num_reg_tokens": 2,
        "init_values": 0.1,
        "use_abs_pos_emb": False,
        "qkv_bias": False,
    },
    "rope_mixed": {"kind": _EVA, "attn_type": "rope", "use_rot_pos_emb": True, "rope_type": "mixed"},
    "beit": {"kind": _BEIT, "use_rel_pos_bias": True, "use_abs_pos_emb": False, "init_values": 0.1},
    "beit_shared": {"kind": _BEIT, "use_shared_rel_pos_bias": True, "swiglu_mlp": True, "qkv_bias": False},
}
#: Backward all-reduces of one block: its two regions', and one of each region with the bias of a fused linear, which
#: every rank holds whole, as it does the norms on queries and keys.
_BACKWARD = {"pooled_by_attention": 2, "gated_in_one": 4, "normed_inside": 7, "eva02": 6, "rope_mixed": 4}
#: Those whose norms inside of regions tell each other a mean and a sum.
_INSIDE = ("normed_inside", "eva02")


def _timm_variant(variant: str, **options: Any) -> Any:
    import timm.layers
    import timm.models.vision_transformer as library

    chosen = {**TIMM_VARIANTS[variant], **options}
    for name, home in (("mlp_layer", timm.layers), ("block_fn", library)):
        if isinstance(chosen.get(name), str):
            chosen[name] = getattr(home, chosen[name])
    return build_timm(**chosen)


def _timm_cases() -> list[Case]:
    refused = (
        {"attn_layer": "diff"},
        {"block_fn": "ParallelScalingBlock"},
        {"block_fn": "ParallelThingsBlock"},
    )
    plain = Supports(checkpointing=False, save_pretrained=False, flash_attention=False)
    common: dict[str, Any] = {"inputs": _timm_inputs, "loss": _loss_of_logits}
    cait = functools.partial(build_timm, "cait.Cait", depth_token_only=2, mlp_ratio_token_only=41 / 48)
    return [
        *(
            Case(
                name=f"timm_{variant}",
                build=functools.partial(_timm_variant, variant),
                layers="blocks",
                collectives=(4 if variant in _INSIDE else 2, _BACKWARD.get(variant, 3)),
                sharded=("q_proj.weight" if variant == "eva02" else "qkv.weight",),
                refuses=refused if variant == "plain" else (),
                supports=replace(plain, sequence=True),
                **common,
            )
            for variant in TIMM_VARIANTS
        ),
        Case(
            name="timm_cait",
            build=cait,
            layers="blocks_token_only",
            collectives=(2, 2),
            sharded=("blocks_token_only.", "mlp."),
            whole=("blocks.0.attn", "blocks.1.attn"),
            supports=plain,
            **common,
        ),
    ]
