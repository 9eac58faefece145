"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_BEIT = "transformers.models.beit.modeling_beit.Beit"
_HEADS = ("Model", "ForImageClassification", "ForMaskedImageModeling", "ForSemanticSegmentation", "Backbone")
#: transformers 5.9 renamed the modules of BEiT.
_LAYOUTS = {"transformers>=5.9.0rc0": "policy:BeitPolicy", "transformers<5.9.0rc0": "early:EarlyBeitPolicy"}
_DATA2VEC = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BEiT, its heads and its backbone, and Data2Vec's vision."""
    return [
        *(
            PolicySpec(target=f"{_BEIT}{head}", policy=f"shard_beit.{policy}", requires=requires)
            for head in _HEADS
            for requires, policy in _LAYOUTS.items()
        ),
        *(
            PolicySpec(target=f"{_DATA2VEC}{head}", policy="shard_beit.early:EarlyBeitPolicy")
            for head in ("Model", "ForImageClassification", "ForSemanticSegmentation")
        ),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and every way to have biases of positions."""
    return ["shard_beit.cases:cases"]
