"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_LABELS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
#: What a family needs beyond the pack: before, what routes tokens in Jamba used the logits that the model hands on.
_NEEDS = {"jamba": "transformers>=5.23.0rc0"}
#: By the module of transformers: the policy, and its classes.
_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bamba": ("shard_hybrids.mamba2:BambaPolicy", ("BambaModel", "BambaForCausalLM")),
    "falcon_h1": ("shard_hybrids.mamba2:FalconH1Policy", ("FalconH1Model", "FalconH1ForCausalLM")),
    "granitemoehybrid": (
        "shard_hybrids.mamba2:GraniteMoeHybridPolicy",
        ("GraniteMoeHybridModel", "GraniteMoeHybridForCausalLM"),
    ),
    "jamba": ("shard_hybrids.mamba1:JambaPolicy", ("JambaModel", "JambaForCausalLM", "JambaForSequenceClassification")),
    "lfm2": ("shard_hybrids.convolutions:Lfm2Policy", ("Lfm2Model", "Lfm2ForCausalLM")),
    "lfm2_moe": ("shard_hybrids.convolutions:Lfm2MoePolicy", ("Lfm2MoeModel", "Lfm2MoeForCausalLM")),
    "mamba2": ("shard_hybrids.single_mixers:Mamba2Policy", ("Mamba2Model", "Mamba2ForCausalLM")),
    "minimax": (
        "shard_hybrids.lightning:MiniMaxPolicy",
        ("MiniMaxModel", "MiniMaxForCausalLM", *(f"MiniMax{head}" for head in _LABELS)),
    ),
    "nemotron_h": ("shard_hybrids.single_mixers:NemotronHPolicy", ("NemotronHModel", "NemotronHForCausalLM")),
    "qwen3_5": (
        "shard_hybrids.delta_nets:Qwen35Policy",
        ("Qwen3_5TextModel", "Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification"),
    ),
    "qwen3_5_moe": (
        "shard_hybrids.delta_nets:Qwen35MoePolicy",
        ("Qwen3_5MoeTextModel", "Qwen3_5MoeForCausalLM"),
    ),
    "qwen3_next": (
        "shard_hybrids.delta_nets:Qwen3NextPolicy",
        ("Qwen3NextModel", "Qwen3NextForCausalLM", *(f"Qwen3Next{head}" for head in _LABELS)),
    ),
    "zamba2": (
        "shard_hybrids.shared_blocks:Zamba2Policy",
        ("Zamba2Model", "Zamba2ForCausalLM", "Zamba2ForSequenceClassification"),
    ),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{name}", policy=policy, requires=_NEEDS.get(module)
        )
        for module, (policy, classes) in _FAMILIES.items()
        for name in classes
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_hybrids.cases:cases"]
