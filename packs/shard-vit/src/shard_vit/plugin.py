"""What this pack offers to shardcore: strings only, so that discovering it imports no library of models."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_VIT = "transformers.models.vit.modeling_vit"
_MODELS = ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling")
#: transformers 5.9 renamed the modules of ViT; where the policies for both are, and how their names begin.
_LAYOUTS = {"transformers>=5.9.0rc0": "policy:", "transformers<5.9.0rc0": "before59:Old"}
#: Matched by name; timm 1.0.23 is the first whose attention computes its width from the heads that it has.
_TIMM = PolicySpec(
    target="timm.models.vision_transformer.VisionTransformer",
    policy="shard_vit.timm_policy:VisionTransformerPolicy",
    requires="timm>=1.0.23",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve ViT of transformers in both layouts, and timm's vision transformers."""
    return [
        *(
            PolicySpec(target=f"{_VIT}.{name}", policy=f"shard_vit.{prefix}{name}Policy", requires=requires)
            for name in _MODELS
            for requires, prefix in _LAYOUTS.items()
        ),
        _TIMM,
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Name the tiny models that the conformance kit tests."""
    return ["shard_vit.cases:cases"]
