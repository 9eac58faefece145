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
    specs = []
    for family, names in _FAMILIES.items():
        module = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
        for name in names:
            own = "families" if family != "Bart" else "policy" if name == "Model" else "heads"
            specs.append(PolicySpec(target=f"{module}.{family}{name}", policy=f"shard_bart.{own}:{family}{name}Policy"))
    return specs


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a Marian of two vocabularies."""
    return ["shard_bart.cases:cases"]
