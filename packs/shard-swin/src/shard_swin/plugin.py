"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_FAMILIES = {"swin.modeling_swin.Swin": "policy:Swin", "swinv2.modeling_swinv2.Swinv2": "second:Swinv2"}
_HEADS = ("Model", "ForImageClassification", "ForMaskedImageModeling", "Backbone")
#: SegFormer had other modules before.
_SEGFORMER = ("Model", "ForImageClassification", "ForSemanticSegmentation")
_NEW = "transformers>=5.10.0rc0"
#: Matched by name, from the release on that shard-vit serves.
_TIMM = {
    "swin_transformer.SwinTransformer": "timm_swin:SwinTransformerPolicy",
    "swin_transformer_v2.SwinTransformerV2": "timm_swin:SwinTransformerV2Policy",
    "swin_transformer_v2_cr.SwinTransformerV2Cr": "timm_swin:SwinTransformerV2CrPolicy",
    "mvitv2.MultiScaleVit": "timm_mvit:MultiScaleVitPolicy",
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Swin and Swin V2 of transformers, their heads and their backbones, SegFormer, and timm's Swins and MViT."""
    windows = [
        PolicySpec(target=f"transformers.models.{models}{head}", policy=f"shard_swin.{policies}{head}Policy")
        for models, policies in _FAMILIES.items()
        for head in _HEADS
    ]
    library = "transformers.models.segformer.modeling_segformer.Segformer"
    pixels = [
        PolicySpec(target=f"{library}{head}", policy="shard_swin.segformer:SegformerPolicy", requires=_NEW)
        for head in _SEGFORMER
    ]
    return [
        *windows,
        *pixels,
        *(
            PolicySpec(target=f"timm.models.{target}", policy=f"shard_swin.{policy}", requires="timm>=1.0.23")
            for target, policy in _TIMM.items()
        ),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and stages whose heads the ranks do not divide; those of timm where it is installed."""
    return ["shard_swin.cases:cases"]
