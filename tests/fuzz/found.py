"""Draws that have found a mistake: each is carried out in every run, whatever the numbers mean by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draws import FAMILIES, Draw

__all__ = ["FOUND"]

# What a draw below does not say otherwise.
_USUAL = {
    "hidden_size": 24,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "attn_implementation": "sdpa",
    "num_labels": 2,
}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "vit": {"image_size": 12, "qkv_bias": True},
    "llama": {"vocab_size": 32, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    "bert": {"vocab_size": 97, "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": False},
}
_TEXT = {"rows": 1, "length": 7, "labels": "some", "mask": "left", "embeds": False}
_BATCHES: Mapping[str, Mapping[str, Any]] = {"vit": {"rows": 1}, "llama": _TEXT, "bert": _TEXT}


def _draw(
    number: int,
    cls: str,
    call: str,
    *,
    tp: int = 2,
    shards: int = 1,
    copies: int = 1,
    pp: int = 1,
    fields: Mapping[str, Any] | None = None,
    heads: int = 4,
    model: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    checkpointing: str = "",
    frozen: float = 0.0,
    **more: Any,
) -> Draw:
    """Return a draw of the family that has ``cls``, on ``tp * shards * copies * pp`` ranks.

    ``model`` and ``batch`` say what is not as usual, and ``more`` what a plain draw does not have.
    """
    family = next(family for family, classes in FAMILIES.items() if cls in classes)
    axes = {"tensor_parallel_size": tp, "dp_shard_size": shards, "dp_replicate_size": copies}
    axes["pipeline_parallel_size"] = pp
    settings = {**_USUAL, **_MODELS[family], "num_attention_heads": heads, **(model or {})}
    return Draw(
        number=number,
        family=family,
        cls=cls,
        mesh={axis: size for axis, size in axes.items() if size > 1 or axis == "tensor_parallel_size"},
        fields=fields or {},
        model={**settings, "heads_of": ((heads, settings.get("num_key_value_heads", heads)),)},
        batch={**_BATCHES[family], **(batch or {})},
        call=call,
        checkpointing=checkpointing,
        frozen=frozen,
        ranks=tp * shards * copies * pp,
        **more,
    )


_ONE_STEP = {"steps": 1, "accumulate": 1, "max_norm": 0.1, "optimizer": "adamw"}


#: What was wrong, and the draw that showed it.
FOUND: Mapping[str, Draw] = {
    "two tokens of one image had one gradient, which an accumulation counted twice": _draw(
        13,
        "ViTForImageClassification",
        "accumulate",
        fields={"enable_sequence_parallelism": True, "enable_fused_normalization": "auto"},
        model={"image_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_labels": 5},
        checkpointing="non-reentrant",
    ),
    "the same, which clipping scaled twice": _draw(
        172,
        "ViTModel",
        "steps",
        tp=3,
        fields={"partial_gradients": "deferred"},
        heads=6,
        model={"image_size": 16, "intermediate_size": 16, "num_labels": 5},
        checkpointing="reentrant",
    ),
    "the same, in two backwards through one graph": _draw(
        60,
        "ViTForImageClassification",
        "retain",
        fields={
            "enable_sequence_parallelism": True,
            "partial_gradients": "in_backward",
            "enable_fused_normalization": "auto",
        },
        heads=6,
        model={"hidden_size": 48, "num_hidden_layers": 1},
    ),
    "gradients of a part that was called by itself were not averaged over replicas": _draw(
        45,
        "ViTForImageClassification",
        "part",
        copies=2,
        model={"hidden_size": 16, "attn_implementation": "eager"},
        checkpointing="reentrant",
        frozen=0.7,
    ),
    "a part that was called by itself had no gathered parameters": _draw(
        80,
        "ViTForImageClassification",
        "part",
        tp=1,
        shards=2,
        fields={"enable_sequence_parallelism": True, "sequence_keep_gathered": False},
        heads=3,
        model={"intermediate_size": 37, "attn_implementation": "eager"},
        checkpointing="non-reentrant",
        frozen=0.7,
    ),
    "the same, beside tensor parallelism": _draw(
        137,
        "LlamaForCausalLM",
        "part",
        shards=2,
        fields={"parallel_output": True},
        model={"num_key_value_heads": 1, "attn_implementation": "eager"},
        batch={"rows": 2, "length": 2, "mask": "right"},
    ),
    "the same as for one image, under recomputation": _draw(
        245,
        "BertForNextSentencePrediction",
        "part",
        copies=2,
        fields={"partial_gradients": "deferred"},
        model={"hidden_size": 32, "intermediate_size": 37, "num_labels": 3},
        batch={"rows": 2, "embeds": True},
        checkpointing="non-reentrant",
    ),
    "the same, of tied weights under recomputation": _draw(
        283,
        "LlamaForCausalLM",
        "part",
        tp=1,
        shards=2,
        fields={"enable_sequence_parallelism": True, "partial_gradients": "deferred"},
        heads=3,
        model={
            "hidden_size": 12,
            "intermediate_size": 37,
            "num_hidden_layers": 3,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_labels": 5,
        },
        batch={"length": 1, "labels": "all", "mask": "right"},
        checkpointing="non-reentrant",
    ),
    "a model that FSDP2 has given another class captured nothing": _draw(
        363,
        "BertModel",
        "captured",
        tp=1,
        shards=2,
        fields={"enable_sequence_parallelism": True, "partial_gradients": "in_backward"},
        heads=1,
        model={
            "vocab_size": 11,
            "hidden_size": 8,
            "intermediate_size": 37,
            "tie_word_embeddings": True,
            "attn_implementation": "eager",
        },
        batch={"labels": "ignored"},
        frozen=0.7,
    ),
    "reading split logits of uneven parts, which came from another stage, ended the process": _draw(
        1_000_023,
        "BertForMaskedLM",
        "training",
        kind="pipeline",
        pp=2,
        fields={"parallel_output": True, "microbatch_size": 2},
        model={"tie_word_embeddings": True},
        batch={"rows": 3, "labels": "all"},
        how=_ONE_STEP,
    ),
    "a reentrant checkpoint under a schedule that splits the backward was an error of torch": _draw(
        1_000_009,
        "LlamaForCausalLM",
        "training",
        kind="pipeline",
        tp=1,
        pp=2,
        fields={"pipeline_schedule": "interleaved_zero_bubble", "num_model_chunks": 2},
        model={"num_hidden_layers": 4, "num_key_value_heads": 2},
        batch={"rows": 4, "labels": "all"},
        checkpointing="reentrant",
        how=_ONE_STEP,
        must="a reentrant checkpoint",
    ),
    "later stages trained blocks that reentrant checkpoints had left without gradients": _draw(
        1_060_016,
        "LlamaForQuestionAnswering",
        "training",
        kind="pipeline",
        tp=1,
        pp=2,
        fields={"pipeline_schedule": "gpipe"},
        batch={"rows": 4, "labels": "all", "embeds": True},
        checkpointing="reentrant",
        how=_ONE_STEP,
        must="reentrant checkpoints of what needs no gradient",
    ),
}
