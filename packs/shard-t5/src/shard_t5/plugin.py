"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = (
    "Model",
    "EncoderModel",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve T5, mT5 and umT5, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{name}",
            policy="shard_t5.policy:T5Policy",
        )
        for family in ("T5", "MT5", "UMT5")
        for name in _MODELS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which the published sizes differ."""
    return ["shard_t5.cases:cases"]
