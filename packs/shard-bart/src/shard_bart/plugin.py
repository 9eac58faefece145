"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_ALL = ("Model", "ForConditionalGeneration", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering")
_FAMILIES = {
    "Bart": _ALL,
    "MBart": _ALL,
    "Marian": ("Model", "MTModel", "ForCausalLM"),
    "Pegasus": ("Model", "ForConditionalGeneration", "ForCausalLM"),
    "Blenderbot": ("Model", "ForConditionalGeneration", "ForCausalLM"),
    "BlenderbotSmall": ("Model", "ForConditionalGeneration", "ForCausalLM"),
    "M2M100": ("Model", "ForConditionalGeneration"),
    "Mvp": _ALL,
    "PLBart": ("Model", "ForConditionalGeneration", "ForCausalLM", "ForSequenceClassification"),
}
#: Where the name of the module is not that of the family in small letters.
_MODULES = {"BlenderbotSmall": "blenderbot_small", "M2M100": "m2m_100"}


def _target(family: str, name: str) -> str:
    module = _MODULES.get(family, family.lower())
    return f"transformers.models.{module}.modeling_{module}.{family}{name}"


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BART and the families that are built like it, and their heads."""
    return [
        PolicySpec(
            target=_target(family, name),
            policy=f"shard_bart.policy:{'Mvp' if family == 'Mvp' else 'Bart'}Policy",
            # It made its masks in float32 before, whatever its dtype.
            requires="transformers>=5.2.0rc0" if family == "Mvp" else None,
        )
        for family, names in _FAMILIES.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a Marian of two vocabularies."""
    return ["shard_bart.cases:cases"]
