"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve SAM and SAM 2, and their encoders of images alone."""
    return [
        *(
            PolicySpec(target=f"transformers.models.sam.modeling_sam.{name}", policy=f"shard_sam.policy:{name}Policy")
            for name in ("SamModel", "SamVisionModel")
        ),
        *(
            PolicySpec(target=f"transformers.models.sam2.modeling_sam2.{name}", policy=f"shard_sam.second:{name}Policy")
            for name in ("Sam2Model", "Sam2VisionModel", "Sam2HieraDetModel")
        ),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_sam.cases:cases"]
