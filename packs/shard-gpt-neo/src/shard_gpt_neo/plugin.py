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
_FAMILIES = {"gpt_neo": "GPTNeo", "gptj": "GPTJ", "gpt_neox": "GPTNeoX", "gpt_neox_japanese": "GPTNeoXJapanese"}
_FILES = {"gpt_neox": "neox", "gpt_neox_japanese": "neox_japanese"}


def _file(module: str, head: str) -> str:
    """Return the file that the policy is in."""
    return _FILES.get(module) or ("policy" if head == "Model" else "heads")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve GPT-Neo, GPT-J, both GPT-NeoX, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_gpt_neo.{_file(module, head)}:{family}{head}Policy",
        )
        for module, family in _FAMILIES.items()
        for head in ("Model", *_HEADS[module])
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_gpt_neo.cases:cases"]
