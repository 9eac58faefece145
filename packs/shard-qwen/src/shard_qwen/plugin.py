"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: What the names of classes begin with, and the policy, by the module of transformers.
_FAMILIES = {
    "qwen2": ("Qwen2", "shard_llama.policy:LlamaPolicy"),
    "qwen3": ("Qwen3", "shard_qwen.policy:Qwen3Policy"),
    "qwen2_moe": ("Qwen2Moe", "shard_qwen.policy:Qwen2MoePolicy"),
    "qwen3_moe": ("Qwen3Moe", "shard_qwen.policy:Qwen3MoePolicy"),
}
#: Before, the attention of Qwen2-MoE computed with the number of all heads.
_REQUIRES = {"qwen2_moe": "transformers>=5.0.0rc0"}
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Qwen2 and Qwen3, dense and with experts, with their heads, and the remote code of the first Qwen."""
    remote = [
        PolicySpec(target=f"transformers_modules.*.QWen{name}", policy="shard_qwen.first:QWenPolicy")
        for name in ("Model", "LMHeadModel")
    ]
    return remote + [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=policy,
            requires=_REQUIRES.get(module),
        )
        for module, (family, policy) in _FAMILIES.items()
        for head in _HEADS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_qwen.cases:cases", "shard_qwen.first_cases:cases"]
