"""Tiny Swins for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shard_swin import timm_cases
from shard_swin.policy import IS_EARLY
from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_SIZE, _PATCH = 12, 2
#: SegFormer as the pack serves it: with a list of stages.
_HAS_SEGFORMER = Version(transformers.__version__) >= Version("5.10.0rc0")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``: two stages, the first with windows that shift."""
    settings: dict[str, Any] = {
        "image_size": _SIZE,
        "patch_size": _PATCH,
        "encoder_stride": 2 * _PATCH,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (4, 8),
        "window_size": 3,
        "mlp_ratio": 37 / 24,  # divides by no number of ranks
        "num_labels": 3,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"), dropout),
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def build_segformer(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny SegFormer of the class ``name``: three stages, the first of which has one head."""
    settings: dict[str, Any] = {
        "num_encoder_blocks": 3,
        "depths": (1, 1, 2),
        "sr_ratios": (2, 3, 1),  # tokens of each side of the image that are one key
        "hidden_sizes": (16, 20, 32),
        "patch_sizes": (3, 3, 3),
        "strides": (2, 1, 2),
        "num_attention_heads": (1, 5, 4),
        "mlp_ratios": (1, 2, 3),  # 16, 40 and 96 channels: three ranks divide one of them
        "decoder_hidden_size": 12,
        "num_labels": 3,
        "attn_implementation": "eager",
        **dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "drop_path_rate"),
            dropout,
        ),
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return three images with what the head of ``model`` learns from."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(3, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64)}
    name = type(model).__name__
    if name.endswith("Segmentation"):
        batch["labels"] = torch.randint(0, 3, (3, _SIZE, _SIZE), generator=generator)
        batch["labels"][:, 0] = 255  # of no class
    elif name.endswith("Classification"):
        batch["labels"] = torch.randint(0, 3, (3,), generator=generator)
    elif name.endswith("Modeling"):
        batch["bool_masked_pos"] = torch.rand(3, (_SIZE // _PATCH) ** 2, generator=generator) < 0.4
    return batch


def maps_loss(out: Any) -> Tensor:
    """Return a loss of a backbone: a weighted mean of the features of each stage."""
    return weighted_mean(*out.feature_maps)


def _cases(family: str, usual: dict[str, Any], options: dict[str, tuple[Any, ...]]) -> list[Case]:
    stem = family.lower()
    around = {"Model": "", "Backbone": "swin." if stem == "swin" and not IS_EARLY else ""}

    def case(name: str, head: str, sizes: tuple[int, ...] = (1, 2, 4), **fields: Any) -> Case:
        settings: dict[str, Any] = {
            "inputs": inputs,
            "layers": f"{around.get(head, f'{stem}.')}encoder.layers.1.blocks",
            "sharded": ("attention.", "relative_position_bias_table" if stem == "swin" else "logit_scale"),
            "collectives": (2, 2 if stem == "swin" else 3),  # of the network of biases gradients are summed
            "whole": ("downsample.reduction",),
            "supports": Supports(
                tensor_parallel=sizes,
                captured=("attentions", "hidden_states"),
                pipeline=head != "Backbone",
                micro_batches=head != "ForMaskedImageModeling",  # a mean over patches that are masked
            ),
            **fields,
        }
        built = partial(build, f"{family}{head}", **usual, **settings.pop("with_", {}))
        return Case(name=f"{stem}_{name}", build=built, **settings)

    states: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state", "pooler_output")}
    maps: dict[str, Any] = {"loss": maps_loss, "with_": {"out_features": ["stage1", "stage2"]}}
    uneven: dict[str, Any] = {"with_": {"num_heads": (3, 12)}, "sizes": (1, 2, 3, 4)}
    uneven["whole"] = ("downsample.reduction", "attention.")
    return [
        case("masked_image_modeling", "ForMaskedImageModeling", outputs=("reconstruction",), options=options),
        case("image_classification", "ForImageClassification", outputs=("logits",)),
        case("uneven", "ForImageClassification", outputs=("logits",), **uneven),
        case("model", "Model", **states),
        case("backbone", "Backbone", **maps),
    ]


def _segformer() -> list[Case]:
    def case(name: str, head: str, around: str = "segformer.", **fields: Any) -> Case:
        settings: dict[str, Any] = {
            "inputs": inputs,
            "layers": f"{around}stages.2.blocks",
            "sharded": ("attention.", "mlp.dwconv"),
            "whole": ("stages.0.blocks.0.attention.", "mlp."),
            "supports": Supports(tensor_parallel=(1, 2, 3, 4), captured=("hidden_states",)),
            **fields,
        }
        return Case(name=f"segformer_{name}", build=partial(build_segformer, f"Segformer{head}"), **settings)

    # The head for pixels normalizes over a batch, and reads the states of all stages.
    pixels = Supports(tensor_parallel=(1, 2, 3, 4), captured=("hidden_states",), micro_batches=False, pipeline=False)
    ways = {"attn_implementation": ("eager", "sdpa"), "reshape_last_stage": (True, False)}
    return [
        case("segmentation", "ForSemanticSegmentation", outputs=("logits",), supports=pixels),
        case("image_classification", "ForImageClassification", outputs=("logits",), options=ways),
        case("model", "Model", around="", loss=hidden_loss, outputs=("last_hidden_state",)),
    ]


def cases() -> list[Case]:
    """Return a case for every class, and one with heads that are whole where the ranks do not divide them."""
    # Early releases have one absolute position too many, and no other attention.
    usual = {"attn_implementation": "eager", "use_absolute_embeddings": not IS_EARLY}
    ways = {"attn_implementation": ("eager",) if IS_EARLY else ("eager", "sdpa"), "qkv_bias": (True, False)}
    swins = [*_cases("Swin", usual, ways), *_cases("Swinv2", {}, {"pretrained_window_sizes": ((0, 0), (4, 4))})]
    return [
        *swins,
        *(_segformer() if _HAS_SEGFORMER else []),
        *(timm_cases.cases() if importlib.util.find_spec("timm") else []),
    ]
