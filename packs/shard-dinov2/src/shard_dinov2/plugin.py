"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_FAMILIES = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
_HEADS = ("Model", "ForImageClassification", "Backbone")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DINOv2 with registers and without, its classifiers and its backbones."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_dinov2.policy:{family}{head}Policy",
        )
        for module, family in _FAMILIES.items()
        for head in _HEADS
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, both kinds of MLP, and masked patches."""
    return ["shard_dinov2.cases:cases"]
