"""Tiny models of the first Qwen's remote code for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny
from shardcore_transformers import remote_class

#: Where the code is, as it lies beside a checkpoint.
CODE = Path(__file__).with_name("remote")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny Qwen of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_channels": 12,
        "intermediate_size": 74,  # half of it divides by no number of ranks
        "seq_length": 64,
        "emb_dropout_prob": dropout,
        "use_cache": False,
        **options,
    }
    return tiny(remote_class(f"modeling_qwen.{name}", CODE), seed=seed, **settings)


def cases() -> list[Case]:
    """Return a case for both classes."""
    common: dict[str, Any] = {
        "inputs": text_batch,
        "sharded": ("c_attn", "attn.c_proj", "mlp.w1", "mlp.c_proj", "wte"),
        "supports": Supports(captured=("hidden_states",), sequence=True, context=True),
        "collectives": (2, 3),  # in the backward, one for the bias of the fused linear, which every rank holds whole
        "refuses": ({"num_attention_heads": 3, "kv_channels": 16},),
    }
    head = partial(build, "QWenLMHeadModel", rotary_pct=0.5, no_bias=False)
    return [
        Case(name="qwen", build=head, outputs=("logits",), layers="transformer.h", **common),
        Case(
            name="qwen_model",
            build=partial(build, "QWenModel"),
            outputs=("last_hidden_state",),
            loss=hidden_loss,
            layers="h",
            **common,
        ),
    ]
