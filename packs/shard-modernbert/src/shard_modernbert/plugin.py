"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.modernbert.modeling_modernbert"
_HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve ModernBERT and its heads."""
    return [
        PolicySpec(target=f"{_MODELS}.ModernBert{head}", policy="shard_modernbert.policy:ModernBertPolicy")
        for head in _HEADS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which its configurations differ."""
    return ["shard_modernbert.cases:cases"]
