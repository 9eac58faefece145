"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = ("OPTModel", "OPTForCausalLM", "OPTForSequenceClassification", "OPTForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve OPT and its heads."""
    return [
        PolicySpec(target=f"transformers.models.opt.modeling_opt.{name}", policy="shard_opt.policy:OPTPolicy")
        for name in _MODELS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which the published sizes differ."""
    return ["shard_opt.cases:cases"]
