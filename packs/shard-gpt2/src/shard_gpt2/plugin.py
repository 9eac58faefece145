"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_GPT2 = "transformers.models.gpt2.modeling_gpt2"
_MODELS = (
    "GPT2Model",
    "GPT2LMHeadModel",
    "GPT2ForSequenceClassification",
    "GPT2ForTokenClassification",
    "GPT2ForQuestionAnswering",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve GPT-2 and its heads."""
    double = "GPT2DoubleHeadsModel"
    return [
        PolicySpec(target=f"{_GPT2}.{double}", policy="shard_gpt2.policy:GPT2DoubleHeadsPolicy"),
        *(PolicySpec(target=f"{_GPT2}.{name}", policy="shard_gpt2.policy:GPT2Policy") for name in _MODELS),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a decoder that attends to an encoder's states."""
    return ["shard_gpt2.cases:cases"]
