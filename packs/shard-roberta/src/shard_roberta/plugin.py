"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODULES = {
    "Roberta": ("transformers.models.roberta.modeling_roberta", "shard_roberta.policy"),
    "XLMRoberta": ("transformers.models.xlm_roberta.modeling_xlm_roberta", "shard_roberta.xlm"),
}
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
    """Serve RoBERTa and XLM-RoBERTa, and their heads."""
    return [
        PolicySpec(target=f"{models}.{family}{head}", policy=f"{policies}:{family}{head}Policy", requires=requires)
        for family, (models, policies) in _MODULES.items()
        for head in _HEADS
        for requires in _REQUIRES.get(f"{family}{head}", (None,))
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a decoder that attends to an encoder's states."""
    return ["shard_roberta.cases:cases"]
