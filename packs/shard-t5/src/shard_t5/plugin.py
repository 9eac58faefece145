"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = ("Model", "EncoderModel")
_HEADS = ("ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve T5, mT5 and umT5, and their heads."""
    specs = []
    for family in ("T5", "MT5", "UMT5"):
        module = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
        for name in (*_MODELS, *_HEADS):
            own = "multilingual" if family != "T5" else "policy" if name in _MODELS else "heads"
            specs.append(PolicySpec(target=f"{module}.{family}{name}", policy=f"shard_t5.{own}:{family}{name}Policy"))
    return specs


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which the published sizes differ."""
    return ["shard_t5.cases:cases"]
