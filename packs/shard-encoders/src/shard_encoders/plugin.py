"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_LABELS = ("ForSequenceClassification", "ForTokenClassification")
_ALL = (*_LABELS, "ForMultipleChoice", "ForQuestionAnswering")
#: By the module of transformers: what the names of its classes begin with, the policy, and the heads besides that of
#: masked words.
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "camembert": ("Camembert", "shard_bert.policy:BertPolicy", ("ForCausalLM", *_ALL)),
    "electra": ("Electra", "shard_encoders.policy:ElectraPolicy", ("ForCausalLM", "ForPreTraining", *_ALL)),
    "esm": ("Esm", "shard_encoders.norms_first:EsmPolicy", _LABELS),
    "eurobert": ("EuroBert", "shard_encoders.policy:EuroBertPolicy", _LABELS),
    "megatron_bert": (
        "MegatronBert",
        "shard_encoders.norms_first:MegatronBertPolicy",
        ("ForCausalLM", "ForNextSentencePrediction", "ForPreTraining", *_ALL),
    ),
    "mpnet": ("MPNet", "shard_encoders.policy:MPNetPolicy", _ALL),
    "roformer": ("RoFormer", "shard_encoders.policy:RoFormerPolicy", ("ForCausalLM", *_ALL)),
    "xlm_roberta_xl": ("XLMRobertaXL", "shard_encoders.norms_first:XLMRobertaXLPolicy", ("ForCausalLM", *_ALL)),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(target=f"transformers.models.{module}.modeling_{module}.{family}{head}", policy=policy)
        for module, (family, policy, heads) in _FAMILIES.items()
        for head in ("Model", "ForMaskedLM", *heads)
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and decoders where a family has them."""
    return ["shard_encoders.cases:cases"]
