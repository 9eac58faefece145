"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_CLASSES = {
    "gemma": ("GemmaModel", "GemmaForCausalLM", "GemmaForSequenceClassification", "GemmaForTokenClassification"),
    "gemma2": ("Gemma2Model", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2ForTokenClassification"),
    "gemma3": ("Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    "gemma3n": ("Gemma3nTextModel", "Gemma3nForCausalLM"),
    "gemma4": ("Gemma4TextModel", "Gemma4ForCausalLM"),
}
_FILES = {"gemma3n": "nano", "gemma4": "fourth"}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Gemma, Gemma 2 and the text models of Gemma 3, 3n and 4, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{name}",
            policy=f"shard_gemma.{_FILES.get(module, 'policy')}:{module.capitalize()}Policy",
        )
        for module, names in _CLASSES.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_gemma.cases:cases"]
