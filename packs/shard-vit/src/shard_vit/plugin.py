"""What this pack offers to shardcore: strings only, so that discovering it imports no library of models."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_LABELS = ("Model", "ForImageClassification")
_ALL = (*_LABELS, "ForMaskedImageModeling")
_BOXES = ("Model", "ForObjectDetection")
#: By the module of transformers: what the names of its classes begin with, and the heads.
_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "deit": ("DeiT", (*_ALL, "ForImageClassificationWithTeacher")),
    "dpt": ("DPT", ("Model", "ForDepthEstimation")),
    "ijepa": ("IJepa", _LABELS),
    "vit": ("ViT", _ALL),
    "vit_mae": ("ViTMAE", ("Model", "ForPreTraining")),
    "vit_msn": ("ViTMSN", _LABELS),
    "yolos": ("Yolos", _BOXES),
}
#: The policies of classes that have one of their own.
_OWN = {
    "DPTModel": "shard_vit.before59:OldViTPolicy",
    "DPTForDepthEstimation": "shard_vit.dpt:DPTForDepthEstimationPolicy",
    "ViTMAEForPreTraining": "shard_vit.mae:ViTMAEForPreTrainingPolicy",
    **{f"Yolos{head}": "shard_vit.yolos:YolosPolicy" for head in _BOXES},
}
#: transformers 5.9 renamed the modules of ViT. Only ViT itself is served before.
_NEW, _OLD = "transformers>=5.9.0rc0", "transformers<5.9.0rc0"
#: Matched by name; timm 1.0.23 is the first whose attention computes its width from the heads that it has.
_TIMM = [
    PolicySpec(target=f"timm.models.{name}", policy=f"shard_vit.{policy}", requires="timm>=1.0.23")
    for name, policy in {
        "vision_transformer.VisionTransformer": "timm_policy:VisionTransformerPolicy",
        "eva.Eva": "timm_eva:EvaPolicy",
        "beit.Beit": "timm_eva:BeitPolicy",
        "cait.Cait": "timm_cait:CaitPolicy",
    }.items()
]


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve ViT of transformers in both layouts, what is built like it, and timm's ViT, EVA, BEiT and CaiT."""
    vit = "transformers.models.vit.modeling_vit.ViT"
    return [
        *(
            PolicySpec(
                target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
                policy=_OWN.get(f"{family}{head}", "shard_vit.policy:ViTPolicy"),
                requires=_NEW,
            )
            for module, (family, heads) in _FAMILIES.items()
            for head in heads
        ),
        *(PolicySpec(target=f"{vit}{head}", policy="shard_vit.before59:OldViTPolicy", requires=_OLD) for head in _ALL),
        *_TIMM,
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Name the tiny models that the conformance kit tests."""
    return ["shard_vit.cases:cases"]
