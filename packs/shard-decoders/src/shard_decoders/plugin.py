"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_LABELS = ("ForSequenceClassification",)
_TOKENS = (*_LABELS, "ForTokenClassification")
_ALL = (*_TOKENS, "ForQuestionAnswering")
_LLAMA = "shard_llama.policy:LlamaPolicy"
#: By the module of transformers: what the names of its classes begin with, the policy, and the heads besides the
#: language model.
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "afmoe": ("Afmoe", "shard_decoders.mixtures:AfmoePolicy", ()),
    "apertus": ("Apertus", "shard_decoders.policy:ApertusPolicy", ("ForTokenClassification",)),
    "arcee": ("Arcee", "shard_decoders.policy:ArceePolicy", _ALL),
    "cohere": ("Cohere", "shard_decoders.policy:CoherePolicy", ()),
    "cohere2": ("Cohere2", "shard_decoders.policy:Cohere2Policy", ()),
    "cwm": ("Cwm", _LLAMA, ()),
    "dots1": ("Dots1", "shard_decoders.mixtures:Dots1Policy", ()),
    "ernie4_5": ("Ernie4_5", _LLAMA, ()),
    "ernie4_5_moe": ("Ernie4_5_Moe", "shard_decoders.mixtures:Ernie45MoePolicy", ()),
    "exaone4": ("Exaone4", "shard_decoders.policy:Exaone4Policy", _ALL),
    "exaone_moe": ("ExaoneMoe", "shard_decoders.mixtures:Dots1Policy", ()),
    "flex_olmo": ("FlexOlmo", "shard_decoders.mixtures:FlexOlmoPolicy", ()),
    "glm4_moe": ("Glm4Moe", "shard_decoders.mixtures:Glm4MoePolicy", ()),
    "gpt_oss": ("GptOss", "shard_decoders.mixtures:GptOssPolicy", _TOKENS),
    "granite": ("Granite", _LLAMA, ()),
    "granitemoe": ("GraniteMoe", "shard_decoders.mixtures:GraniteMoePolicy", ()),
    "helium": ("Helium", _LLAMA, _TOKENS),
    "hunyuan_v1_dense": ("HunYuanDenseV1", "shard_decoders.policy:HunYuanDenseV1Policy", _LABELS),
    "hunyuan_v1_moe": ("HunYuanMoEV1", "shard_decoders.mixtures:HunYuanMoEV1Policy", _LABELS),
    "hy_v3": ("HYV3", "shard_decoders.mixtures:Dots1Policy", ()),
    "hyperclovax": ("HyperCLOVAX", "shard_decoders.policy:HyperCLOVAXPolicy", ()),
    "jais2": ("Jais2", "shard_decoders.policy:NemotronPolicy", ()),
    "llama4": ("Llama4", "shard_decoders.mixtures:Llama4Policy", ()),
    "mellum": ("Mellum", "shard_decoders.mixtures:MellumPolicy", ()),
    "minimax_m2": ("MiniMaxM2", "shard_decoders.mixtures:MiniMaxM2Policy", ()),
    "minimax_m3_vl": ("MiniMaxM3VL", "shard_decoders.sparse:MiniMaxM3Policy", ()),
    "nemotron": ("Nemotron", "shard_decoders.policy:NemotronPolicy", _ALL),
    "olmo": ("Olmo", "shard_decoders.policy:OlmoPolicy", _LABELS),
    "olmo2": ("Olmo2", "shard_decoders.policy:Olmo2Policy", _LABELS),
    "olmo3": ("Olmo3", "shard_decoders.policy:Olmo2Policy", _LABELS),
    "olmoe": ("Olmoe", "shard_decoders.mixtures:OlmoePolicy", ()),
    "seed_oss": ("SeedOss", _LLAMA, _ALL),
    "smollm3": ("SmolLM3", _LLAMA, _ALL),
    "solar_open": ("SolarOpen", "shard_decoders.mixtures:SolarOpenPolicy", ()),
    "starcoder2": ("Starcoder2", "shard_decoders.policy:Starcoder2Policy", _TOKENS),
}
#: Families whose names are others without a language model.
_HEADLESS = {"llama4": "Llama4Text", "minimax_m3_vl": "MiniMaxM3VLText"}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(target=f"transformers.models.{module}.modeling_{module}.{name}", policy=policy)
        for module, (family, policy, heads) in _FAMILIES.items()
        for name in (f"{_HEADLESS.get(module, family)}Model", *(family + head for head in ("ForCausalLM", *heads)))
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_decoders.cases:cases"]
