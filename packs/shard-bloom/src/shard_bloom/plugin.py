"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.bloom.modeling_bloom"
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BLOOM and its heads."""
    return [PolicySpec(target=f"{_MODELS}.Bloom{head}", policy="shard_bloom.policy:BloomPolicy") for head in _HEADS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the residual connections that some configurations take behind the norms."""
    return ["shard_bloom.cases:cases"]
