"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_FAMILIES = {"swin.modeling_swin.Swin": "policy:Swin", "swinv2.modeling_swinv2.Swinv2": "second:Swinv2"}
_HEADS = ("Model", "ForImageClassification", "ForMaskedImageModeling", "Backbone")
#: SegFormer had other modules before.
_SEGFORMER = ("Model", "ForImageClassification", "ForSemanticSegmentation")
_NEW = "transformers>=5.10.0rc0"


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Swin and Swin V2, their heads and their backbones, and SegFormer."""
    windows = [
        PolicySpec(target=f"transformers.models.{models}{head}", policy=f"shard_swin.{policies}{head}Policy")
        for models, policies in _FAMILIES.items()
        for head in _HEADS
    ]
    library = "transformers.models.segformer.modeling_segformer.Segformer"
    return windows + [
        PolicySpec(target=f"{library}{head}", policy="shard_swin.segformer:SegformerPolicy", requires=_NEW)
        for head in _SEGFORMER
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and stages whose heads the ranks do not divide."""
    return ["shard_swin.cases:cases"]
