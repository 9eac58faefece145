"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_SINCE_5 = ("Ministral", "Ministral3")
_KINDS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Mistral, Ministral and Mixtral, with all their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{kind}",
            policy="shard_mistral.policy:MixtralPolicy" if family == "Mixtral" else "shard_llama.policy:LlamaPolicy",
            requires="transformers>=5.0.0rc0" if family in _SINCE_5 else None,
        )
        for family in ("Ministral", "Ministral3", "Mistral", "Mixtral")
        for kind in _KINDS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and what experts add to a decoder."""
    return ["shard_mistral.cases:cases"]
