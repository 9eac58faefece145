"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.deberta_v2.modeling_deberta_v2.DebertaV2"
_HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DeBERTa-v2 and its heads."""
    specs = []
    for head in _HEADS:
        module = "policy" if head == "Model" else "heads"
        specs.append(PolicySpec(target=f"{_MODELS}{head}", policy=f"shard_deberta.{module}:DebertaV2{head}Policy"))
    return specs


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which positions are attended to."""
    return ["shard_deberta.cases:cases"]
