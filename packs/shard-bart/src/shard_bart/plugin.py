"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_ALL = ("Model", "ForConditionalGeneration", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
_FAMILIES = {
    "Bart": _ALL,
    "MBart": _ALL,
    "Marian": ("Model", "MTModel", "ForCausalLM"),
    "Pegasus": ("Model", "ForConditionalGeneration", "ForCausalLM"),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BART, mBART, Marian and Pegasus, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{name}",
            policy="shard_bart.policy:BartPolicy",
        )
        for family, names in _FAMILIES.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a Marian of two vocabularies."""
    return ["shard_bart.cases:cases"]
