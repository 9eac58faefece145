"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.albert.modeling_albert"
_HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve ALBERT and its heads."""
    return [PolicySpec(target=f"{_MODELS}.Albert{head}", policy="shard_albert.policy:AlbertPolicy") for head in _HEADS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and layers that are shared in groups."""
    return ["shard_albert.cases:cases"]
