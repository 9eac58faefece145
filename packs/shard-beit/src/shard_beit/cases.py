"""Tiny BEiTs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

#: Whether BEiT has the names of BERT, as Data2Vec has in every release.
_IS_EARLY = Version(transformers.__version__) < Version("5.9.0rc0")
_SIZE, _PATCH = 12, 2
_TOKENS = 23


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``: 36 patches and the class token, two layers with a bias each."""
    settings: dict[str, Any] = {
        "image_size": _SIZE,
        "patch_size": _PATCH,
        "hidden_size": 40,
        "intermediate_size": 37,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 3,
        "vocab_size": _TOKENS,
        "use_relative_position_bias": True,
        "attn_implementation": "eager",
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"), dropout),
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return three images with what the head of ``model`` learns from."""
    generator = torch.Generator().manual_seed(seed)
    batch = {"pixel_values": torch.randn(3, 3, _SIZE, _SIZE, generator=generator, dtype=torch.float64)}
    match type(model).__name__.removeprefix("FSDP").removeprefix("Beit").removeprefix("Data2VecVision"):
        case "ForImageClassification":
            batch["labels"] = torch.randint(0, 3, (3,), generator=generator)
        case "ForMaskedImageModeling":
            patches = (_SIZE // _PATCH) ** 2
            order = torch.rand(3, patches, generator=generator).argsort(1)
            batch["bool_masked_pos"] = order < 10  # of each image as many
            batch["labels"] = torch.randint(0, _TOKENS, (30,), generator=generator)
        case "ForSemanticSegmentation":
            batch["labels"] = torch.randint(0, 3, (3, _SIZE, _SIZE), generator=generator)
    return batch


def maps_loss(out: Any) -> Tensor:
    """Return a loss of a backbone: a weighted mean of the features of each stage."""
    return weighted_mean(*out.feature_maps)


def _case(name: str, head: str, *, family: str = "Beit", pipeline: bool = True, **fields: Any) -> Case:
    early = _IS_EARLY or family != "Beit"
    model = "beit." if family == "Beit" else "data2vec_vision."
    around = "" if head == "Model" or (early and head == "Backbone") else model
    settings: dict[str, Any] = {
        "inputs": inputs,
        "layers": around + ("encoder.layer" if early else "layers"),
        "sharded": ("attention.", "relative_position_bias_table"),
        "supports": Supports(captured=("attentions", "hidden_states"), pipeline=pipeline),
        **fields,
    }
    return Case(name=name, build=partial(build, f"{family}{head}", **settings.pop("with_", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class, and for biases that all layers share."""
    ways = {"attn_implementation": ("eager", "sdpa"), "use_absolute_position_embeddings": (False, True)}
    pixels = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": [2, 3]}
    data2vec: dict[str, Any] = {"family": "Data2VecVision", "outputs": ("logits",)}
    shared = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
    return [
        _case("image_classification", "ForImageClassification", outputs=("logits",), options=ways),
        _case(
            "shared",
            "ForImageClassification",
            outputs=("logits",),
            with_=shared,
            # The bias is computed once, and each reentrant checkpoint would go back through it. Early releases compute
            # it for each layer.
            supports=Supports(captured=("attentions", "hidden_states"), reentrant=_IS_EARLY),
        ),
        _case("masked_image_modeling", "ForMaskedImageModeling", outputs=("logits",), with_={"use_mask_token": True}),
        _case("model", "Model", loss=hidden_loss, outputs=("last_hidden_state", "pooler_output")),
        _case(
            "semantic_segmentation",
            "ForSemanticSegmentation",
            outputs=("logits",),
            with_=pixels,
            pipeline=False,
        ),
        _case("backbone", "Backbone", loss=maps_loss, with_={"out_features": ["stage1", "stage2"]}, pipeline=False),
        _case("data2vec_image_classification", "ForImageClassification", options=ways, **data2vec),
        _case("data2vec_shared", "ForImageClassification", with_=shared, **data2vec),
        _case("data2vec_semantic_segmentation", "ForSemanticSegmentation", with_=pixels, pipeline=False, **data2vec),
        _case("data2vec_model", "Model", loss=hidden_loss, **{**data2vec, "outputs": ("last_hidden_state",)}),
    ]
