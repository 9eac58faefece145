"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.ernie.modeling_ernie"
_HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForCausalLM",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve ERNIE and its heads."""
    return [PolicySpec(target=f"{_MODELS}.Ernie{head}", policy="shard_ernie.policy:ErniePolicy") for head in _HEADS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a decoder that attends to an encoder's states."""
    return ["shard_ernie.cases:cases"]
