"""Tiny Moonshines for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version

from shardcore_testing import Case, Supports, hidden_loss, tiny

_OLD = Version(transformers.__version__) < Version("5")
_SAMPLES = 2300  # of which convolutions make 5 frames


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, **options: Any) -> Any:
    """Return a tiny model of the class ``name``, whose attentions have ``heads`` heads each."""
    settings: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 83,  # divides by no number of ranks
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": heads,
        "decoder_num_attention_heads": heads,
        "max_position_embeddings": 24,
        "attention_bias": True,
        "attention_dropout": dropout,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "sdpa",
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Any]:
    """Return right-padded sound (3, 2300), and words (3, 7) that it is, or that come before others."""
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(3, _SAMPLES, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([2300, 1100, 1600]).roll(seed)
    mask = (torch.arange(_SAMPLES) < lengths[:, None]).long()
    words = torch.randint(3, model.config.vocab_size, (3, 7), generator=generator)
    batch = {"input_values": sound * mask, "attention_mask": mask}
    if type(model).__name__.endswith("Model"):
        return {**batch, "decoder_input_ids": words}
    ends = torch.tensor([7, 4, 6]).roll(seed)
    return {**batch, "labels": words.masked_fill(torch.arange(7) >= ends[:, None], -100)}


_STACKS = ("decoder_attentions", "cross_attentions", "decoder_hidden_states", "encoder_attentions")


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "options": {"attn_implementation": ("sdpa", "eager"), "pad_head_dim_to_multiple_of": (None, 8)},
        "sharded": ("self_attn.q_proj", "encoder_attn.o_proj", "fc1", "fc2"),
        "refuses": ({"heads": 7, "hidden_size": 56},),
        "collectives": (3, 4),  # one more is that of the bias of gates and features together
        "supports": Supports(sequence=True, context=True, captured=_STACKS),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    generation = _case(
        "moonshine_generation",
        "MoonshineForConditionalGeneration",
        outputs=("logits",),
        layers="model.decoder.layers",
    )
    return [
        replace(generation, supports=replace(generation.supports, generation=True)),
        _case(
            "moonshine_model",
            "MoonshineModel",
            loss=hidden_loss,
            outputs=("encoder_last_hidden_state",),
            layers="decoder.layers",
        ),
    ]
