"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_ALL = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
#: By the module of transformers: what the names of its classes begin with, and the heads besides the language model.
_DENSE: dict[str, tuple[str, tuple[str, ...]]] = {
    "apertus": ("Apertus", ("ForTokenClassification",)),
    "arcee": ("Arcee", _ALL),
    "cohere2": ("Cohere2", ()),
    "ernie4_5": ("Ernie4_5", ()),
    "exaone4": ("Exaone4", _ALL),
    "granite": ("Granite", ()),
    "helium": ("Helium", ("ForSequenceClassification", "ForTokenClassification")),
    "hunyuan_v1_dense": ("HunYuanDenseV1", ("ForSequenceClassification",)),
    "nemotron": ("Nemotron", _ALL),
    "olmo2": ("Olmo2", ("ForSequenceClassification",)),
    "olmo3": ("Olmo3", ("ForSequenceClassification",)),
    "seed_oss": ("SeedOss", _ALL),
    "smollm3": ("SmolLM3", _ALL),
    "starcoder2": ("Starcoder2", ("ForSequenceClassification", "ForTokenClassification")),
}
_MIXTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dots1": ("Dots1", ()),
    "ernie4_5_moe": ("Ernie4_5_Moe", ()),
    "glm4_moe": ("Glm4Moe", ()),
    "gpt_oss": ("GptOss", ("ForSequenceClassification", "ForTokenClassification")),
    "granitemoe": ("GraniteMoe", ()),
    "hunyuan_v1_moe": ("HunYuanMoEV1", ("ForSequenceClassification",)),
    "minimax_m2": ("MiniMaxM2", ()),
    "olmoe": ("Olmoe", ()),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_decoders.{where}:{family.replace('_', '')}Policy",
        )
        for where, families in (("policy", _DENSE), ("mixtures", _MIXTURES))
        for module, (family, heads) in families.items()
        for head in ("Model", "ForCausalLM", *heads)
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_decoders.cases:cases"]
