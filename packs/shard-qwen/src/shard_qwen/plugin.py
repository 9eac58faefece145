"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_FAMILIES = {
    "qwen2": "policy:Qwen2",
    "qwen3": "policy:Qwen3",
    "qwen2_moe": "moe:Qwen2Moe",
    "qwen3_moe": "moe:Qwen3Moe",
}
#: Before, the attention of Qwen2-MoE computed with the number of all heads.
_REQUIRES = {"qwen2_moe": "transformers>=5.0.0rc0"}
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Qwen2 and Qwen3, dense and with experts, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{family}.modeling_{family}.{policy.partition(':')[2]}{head}",
            policy=f"shard_qwen.{policy}Policy",
            requires=_REQUIRES.get(family),
        )
        for family, policy in _FAMILIES.items()
        for head in _HEADS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_qwen.cases:cases"]
