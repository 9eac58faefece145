"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_BEIT = "transformers.models.beit.modeling_beit"
_HEADS = ("ForImageClassification", "ForMaskedImageModeling", "ForSemanticSegmentation", "Backbone")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BEiT, its heads and its backbone."""
    heads = [PolicySpec(target=f"{_BEIT}.Beit{head}", policy=f"shard_beit.heads:Beit{head}Policy") for head in _HEADS]
    return [PolicySpec(target=f"{_BEIT}.BeitModel", policy="shard_beit.policy:BeitModelPolicy"), *heads]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and every way to have biases of positions."""
    return ["shard_beit.cases:cases"]
