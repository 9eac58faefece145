"""Tiny transformers of torch for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardcore_testing import Case, Supports, randomized, weighted_mean

_SIZE, _MEMORY = 48, 7
_PADDING = ((0, 3, 1), (2, 0, 4), (3, 1, 0))


def build(
    name: str,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    heads: int = 12,
    norm: bool = True,
    mixing: bool = False,
    **options: Any,
) -> Any:
    """Return a tiny module of torch.nn: batch first, two layers; with ``mixing`` its activation mixes features."""
    given = {"batch_first": True, "dropout": dropout, **({"activation": nn.Softmax(-1)} if mixing else {}), **options}
    if name == "MultiheadAttention":
        return randomized(nn.MultiheadAttention(_SIZE, heads, **given), seed)
    layer = {"d_model": _SIZE, "nhead": heads, "dim_feedforward": 37, **given}  # 37 divides by no number of ranks
    if name.endswith("Layer"):
        return randomized(getattr(nn, name)(**layer), seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True, but", UserWarning)
        if name == "Transformer":
            return randomized(nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **layer), seed)
        one = getattr(nn, f"{name}Layer")(**layer)
        return randomized(getattr(nn, name)(one, 2, nn.LayerNorm(_SIZE) if norm else None), seed)


def inputs(model: Any, seed: int) -> dict[str, Any]:
    """Return states (3, 5, 48) and what they attend to (3, 7, 48), with masks, padding at the end of rows."""
    generator = torch.Generator().manual_seed(seed)

    def states(tokens: int, size: int = _SIZE) -> Tensor:
        return torch.randn(3, tokens, size, generator=generator, dtype=torch.float64)

    def padding(tokens: int) -> Tensor:
        return torch.arange(tokens) >= tokens - torch.tensor(_PADDING[seed % 3])[:, None]

    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    match type(model).__name__.removeprefix("FSDP"):
        case "MultiheadAttention":
            given = {"query": states(5), "key": states(7, model.kdim), "value": states(7, model.vdim)}
            return {**given, "key_padding_mask": padding(7), "need_weights": False}
        case "TransformerEncoder" | "TransformerEncoderLayer":
            return {"src": states(5), "src_key_padding_mask": padding(5)}
        case "Transformer":
            names = {"src_key_padding_mask": padding(7), "memory_key_padding_mask": padding(7)}
            return {"src": states(7), "tgt": states(5), "tgt_mask": causal, **names}
        case _:
            return {
                "tgt": states(5),
                "memory": states(7),
                "tgt_mask": causal,
                "memory_key_padding_mask": padding(7),
            }


def loss(out: Any) -> Tensor:
    """Return a weighted mean of what a module returns first."""
    return weighted_mean(out[0] if isinstance(out, tuple) else out)


def _case(name: str, kind: str, *, stacked: bool = False, **fields: Any) -> Case:
    supports = Supports(
        tensor_parallel=(1, 2, 3, 4),
        sequence=stacked,
        checkpointing=False,
        save_pretrained=False,
        flash_attention=False,
    )
    settings: dict[str, Any] = {"inputs": inputs, "loss": loss, "supports": supports, "sharded": ("in_proj_weight",)}
    return Case(name=name, build=partial(build, kind, **fields.pop("options_of_build", {})), **{**settings, **fields})


def cases() -> list[Case]:
    """Return a case for each class, and further ones for what they are made with."""
    both = ("linear1", "linear2", "out_proj", "in_proj_weight")
    return [
        _case(
            "transformer",
            "Transformer",
            stacked=True,
            layers="decoder.layers",
            collectives=(3, 5),
            options={"norm_first": (False, True), "bias": (True, False)},
            refuses=({"mixing": True},),
            sharded=both,
        ),
        _case("encoder", "TransformerEncoder", stacked=True, collectives=(2, 3), sharded=both),
        _case("decoder", "TransformerDecoder", stacked=True, collectives=(3, 5), sharded=both),
        _case("encoder_layer", "TransformerEncoderLayer", collectives=(2, 3), sharded=both),
        _case("decoder_layer", "TransformerDecoderLayer", collectives=(3, 6), sharded=both),
        _case(
            "attention",
            "MultiheadAttention",
            options={"bias": (True, False), "add_bias_kv": (False, True)},
            collectives=(1, 4),
        ),
        _case(
            "attention_of_others",
            "MultiheadAttention",
            options_of_build={"kdim": 20, "vdim": 28, "add_zero_attn": True},
            collectives=(1, 4),
            sharded=("q_proj_weight", "k_proj_weight", "v_proj_weight"),
        ),
    ]
