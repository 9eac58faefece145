"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.falcon.modeling_falcon"
_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Falcon and its heads."""
    return [PolicySpec(target=f"{_MODELS}.Falcon{head}", policy="shard_falcon.policy:FalconPolicy") for head in _HEADS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the generations of Falcon."""
    return ["shard_falcon.cases:cases"]
