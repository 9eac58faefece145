"""Tiny DINOv2s for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

__all__ = ["build", "cases", "inputs"]

_SIZE, _PATCH = 12, 2
_CAPTURED = ("attentions", "hidden_states")
#: A gated MLP has two projections in one linear.
_HAS_GATED = Version(torch.__version__) >= Version("2.12")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``: 36 patches, the class token and maybe registers, two blocks."""
    settings: dict[str, Any] = {
        "image_size": _SIZE,
        "patch_size": _PATCH,
        "hidden_size": 44,  # and so many features of the MLP: three ranks do not divide them
        "mlp_ratio": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 3,
        "attn_implementation": "eager",
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"), dropout),
        **({"num_register_tokens": 3} if "Registers" in name else {}),
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


def maps_loss(out: Any) -> Tensor:
    """Return a loss of a backbone: a weighted mean of the features of each stage."""
    return weighted_mean(*out.feature_maps)


def _cases(family: str, prefix: str, around: str) -> list[Case]:
    def case(name: str, head: str, *, sequence: bool = True, **fields: Any) -> Case:
        settings: dict[str, Any] = {
            "inputs": inputs,
            "layers": f"{around if head == 'ForImageClassification' else ''}encoder.layer",
            "sharded": ("attention.", "mlp."),
            "supports": Supports(tensor_parallel=(1, 2, 3, 4), sequence=sequence, context=sequence, captured=_CAPTURED),
            **fields,
        }
        return Case(
            name=prefix + name, build=partial(build, f"{family}{head}", **settings.pop("with_", {})), **settings
        )

    ways = {"attn_implementation": ("eager", "sdpa"), "qkv_bias": (True, False)}
    states: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state", "pooler_output")}
    maps: dict[str, Any] = {"loss": maps_loss, "with_": {"out_features": ["stage1", "stage2"]}}
    gated = case("gated", "ForImageClassification", outputs=("logits",), with_={"use_swiglu_ffn": True})
    return [
        case("image_classification", "ForImageClassification", outputs=("logits",), options=ways),
        *([gated] if _HAS_GATED else []),
        case("masked", "Model", **states, inputs=partial(inputs, masked=True)),
        case("backbone", "Backbone", sequence=False, **maps),
    ]


def cases() -> list[Case]:
    """Return a case for every class, and for both kinds of MLP."""
    return [
        *_cases("Dinov2", "dinov2_", "dinov2."),
        *_cases("Dinov2WithRegisters", "registers_", "dinov2_with_registers."),
    ]
