"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_BERT = "transformers.models.bert.modeling_bert"
_MODELS = (
    "BertModel",
    "BertForPreTraining",
    "BertLMHeadModel",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BERT and its heads."""
    return [PolicySpec(target=f"{_BERT}.{name}", policy="shard_bert.policy:BertPolicy") for name in _MODELS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Name the tiny models that the conformance kit tests."""
    return ["shard_bert.cases:cases"]
