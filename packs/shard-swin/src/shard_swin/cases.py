"""Tiny Swins for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shard_swin.policy import IS_EARLY
from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_SIZE, _PATCH = 12, 2


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


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return three images with what the head of ``model`` learns from."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(3, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64)}
    name = type(model).__name__
    if name.endswith("Classification"):
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


def cases() -> list[Case]:
    """Return a case for every class, and one with heads that are whole where the ranks do not divide them."""
    # Early releases have one absolute position too many, and no other attention.
    usual = {"attn_implementation": "eager", "use_absolute_embeddings": not IS_EARLY}
    ways = {"attn_implementation": ("eager",) if IS_EARLY else ("eager", "sdpa"), "qkv_bias": (True, False)}
    return [*_cases("Swin", usual, ways), *_cases("Swinv2", {}, {"pretrained_window_sizes": ((0, 0), (4, 4))})]
