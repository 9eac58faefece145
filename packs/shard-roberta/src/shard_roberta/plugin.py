"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = {"roberta": "Roberta", "xlm_roberta": "XLMRoberta"}
_HEADS = (
    "Model",
    "ForCausalLM",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForTokenClassification",
    "ForQuestionAnswering",
)


# Between these releases the class has no pooler, which its forward reads: it cannot be called.
_REQUIRES = {"XLMRobertaForMultipleChoice": ("transformers<5", "transformers>=5.14")}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve RoBERTa and XLM-RoBERTa, and their heads: their policy is that of BERT."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy="shard_bert.policy:BertPolicy",
            requires=requires,
        )
        for module, family in _MODELS.items()
        for head in _HEADS
        for requires in _REQUIRES.get(f"{family}{head}", (None,))
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a decoder that attends to an encoder's states."""
    return ["shard_roberta.cases:cases"]
