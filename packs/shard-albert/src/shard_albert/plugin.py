"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.albert.modeling_albert"
_HEADS = (
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
    model = PolicySpec(target=f"{_MODELS}.AlbertModel", policy="shard_albert.policy:AlbertModelPolicy")
    heads = [
        PolicySpec(target=f"{_MODELS}.Albert{head}", policy=f"shard_albert.heads:Albert{head}Policy") for head in _HEADS
    ]
    return [model, *heads]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and layers that are shared in groups."""
    return ["shard_albert.cases:cases"]
