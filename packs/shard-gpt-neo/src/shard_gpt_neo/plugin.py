"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_ALL = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_HEADS = {
    "gpt_neo": _ALL,
    "gptj": ("ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering"),
    "gpt_neox": _ALL,
    "gpt_neox_japanese": ("ForCausalLM",),
}
_POLICIES = {
    "gpt_neo": ("GPTNeo", "policy"),
    "gptj": ("GPTJ", "policy"),
    "gpt_neox": ("GPTNeoX", "neox"),
    "gpt_neox_japanese": ("GPTNeoXJapanese", "neox_japanese"),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve GPT-Neo, GPT-J, both GPT-NeoX, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_gpt_neo.{file}:{family}Policy",
        )
        for module, (family, file) in _POLICIES.items()
        for head in ("Model", *_HEADS[module])
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_gpt_neo.cases:cases"]
