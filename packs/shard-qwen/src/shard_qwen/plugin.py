"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Qwen2 and Qwen3, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{family}.modeling_{family}.{family.title()}{head}",
            policy=f"shard_qwen.policy:{family.title()}{head}Policy",
        )
        for family in ("qwen2", "qwen3")
        for head in _HEADS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_qwen.cases:cases"]
