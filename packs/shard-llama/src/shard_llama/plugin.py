"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_LLAMA = "transformers.models.llama.modeling_llama"
_MODELS = (
    "LlamaModel",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "LlamaForTokenClassification",
    "LlamaForQuestionAnswering",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Llama and its heads."""
    return [PolicySpec(target=f"{_LLAMA}.{name}", policy="shard_llama.policy:LlamaPolicy") for name in _MODELS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_llama.cases:cases"]
