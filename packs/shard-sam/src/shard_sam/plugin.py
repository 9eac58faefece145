"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve SAM, and its encoder of images alone."""
    return [
        PolicySpec(target=f"transformers.models.sam.modeling_sam.{name}", policy=f"shard_sam.policy:{name}Policy")
        for name in ("SamModel", "SamVisionModel")
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test both classes."""
    return ["shard_sam.cases:cases"]
