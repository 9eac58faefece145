"""Tiny models of ChatGLM2's remote code for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shardcore_testing import Case, Supports, text_batch, tiny, weighted_mean
from shardcore_transformers import remote_class

#: Where the code is, as it lies beside a checkpoint.
CODE = Path(__file__).with_name("remote")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny ChatGLM2 of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "padded_vocab_size": 101,
        "hidden_size": 48,
        "ffn_hidden_size": 37,  # divides by no number of ranks
        "kv_channels": 8,
        "num_attention_heads": 4,
        "multi_query_group_num": 2,
        "seq_length": 64,
        "hidden_dropout": dropout,
        "use_cache": False,
        **options,
    }
    return tiny(remote_class(f"modeling_chatglm.{name}", CODE), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids with labels."""
    batch = text_batch(model, seed)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = {"labels": ids.masked_fill(mask == 0, -100)} if hasattr(model, "transformer") else {}
    return {"input_ids": ids, "attention_mask": mask, **labels}


def rows_loss(out: Any) -> Tensor:
    """Return a loss of hidden states (S, B, H): a mean over rows, which are not the first dim."""
    return weighted_mean(out.last_hidden_state.mean(1))


def cases() -> list[Case]:
    """Return a case for both classes, and for heads that share no keys and values."""
    # Numbers for (B, S, H) are drawn in another order than those for (S, B, H), with which the kit compares them.
    supports = Supports(captured=("hidden_states",), sequence=True, context=True, dropout=False)
    common: dict[str, Any] = {
        "inputs": inputs,
        "sharded": ("query_key_value", "dense.weight", "dense_h_to_4h", "dense_4h_to_h", "word_embeddings"),
        "supports": supports,
        "refuses": ({"num_attention_heads": 3, "multi_query_group_num": 3},),
    }
    causal = "ChatGLMForConditionalGeneration"
    plain = {"multi_query_attention": False, "rmsnorm": False, "add_bias_linear": True}
    words = {"apply_residual_connection_post_layernorm": (False, True)}
    layers = "transformer.encoder.layers"
    return [
        Case(
            name="chatglm2", build=partial(build, causal), options=words, outputs=("logits",), layers=layers, **common
        ),
        Case(
            name="chatglm2_plain", build=partial(build, causal, **plain), outputs=("logits",), layers=layers, **common
        ),
        Case(
            name="chatglm2_model",
            build=partial(build, "ChatGLMModel"),
            outputs=("last_hidden_state",),
            loss=rows_loss,
            layers="encoder.layers",
            **common,
        ),
    ]
