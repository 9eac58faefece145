"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_HEADS = {
    "gpt_neo": ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "gptj": ("ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering"),
}
_FAMILIES = {"gpt_neo": "GPTNeo", "gptj": "GPTJ"}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve GPT-Neo and GPT-J, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_gpt_neo.{'policy' if head == 'Model' else 'heads'}:{family}{head}Policy",
        )
        for module, family in _FAMILIES.items()
        for head in ("Model", *_HEADS[module])
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_gpt_neo.cases:cases"]
