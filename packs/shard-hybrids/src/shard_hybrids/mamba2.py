"""How decoders with mixers of Mamba-2 are sharded: Bamba, Falcon-H1, Granite 4."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_hybrids.policy import HybridPolicy, features
from shard_hybrids.state_spaces import gated_norm, unfused
from shard_llama.mixtures import MixturePolicy
from shardcore.policy import Check, Heads, Rule
from shardcore.styles import attribute, by_heads, local_heads, local_kv_heads, region, segments


class BambaPolicy(HybridPolicy):
    """Bamba. The steps of the heads of a group have what goes in and out of their states in common, B and C."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_ff_layernorm")
    final: ClassVar[str] = "final_layernorm"
    mlp: ClassVar[str] = "feed_forward"
    #: What the configuration calls the features of a head, and of its states.
    sizes: ClassVar[tuple[str, str]] = ("mamba_d_head", "mamba_d_state")
    #: A mixer multiplies its features by numbers that it keeps.
    multiplied: ClassVar[bool] = False
    mixer: ClassVar[str] = "BambaMixer"
    checks: ClassVar[tuple[Check, ...]] = (
        *HybridPolicy.checks,
        Heads("mamba_n_heads", kv="mamba_n_groups", of="BambaMixer"),
    )
    stages = replace(HybridPolicy.stages, last="final_layernorm")

    def mixing(self) -> list[Rule]:
        """Return the rules of a mixer: its linear makes gates, inputs, B, C and the sizes of steps."""
        size, state = (getattr(self.model.config, name) for name in self.sizes)
        channels = segments("conv1d", ("query", "key", "key"), sizes=(size, state, state))
        fused = segments("in_proj", ("query", "query", "key", "key", "query"), sizes=(size, size, state, state, 1))
        return [
            region(enter="", col=fused, row="out_proj", unit="head", partial=channels),
            by_heads("dt_bias", "A_log", "D"),
            gated_norm(),
            unfused(multiplied=self.multiplied),
            attribute("num_heads", local_heads),
            attribute("n_groups", local_kv_heads),
            attribute("intermediate_size", features(query=size)),
            attribute("conv_dim", features(query=size, kv=2 * state)),
        ]


class FalconH1Policy(BambaPolicy):
    """Falcon-H1: every block has an attention and a mixer beside it."""

    multiplied: ClassVar[bool] = True
    mixer: ClassVar[str] = "FalconH1Mixer"
    checks = (*HybridPolicy.checks, Heads("mamba_n_heads", kv="mamba_n_groups", of=mixer))

    def mixing(self) -> list[Rule]:
        """Return the rules of a mixer, whose norm, if it has one, counts its groups."""
        return [*super().mixing(), attribute("norm.n_groups", local_kv_heads, optional=True)]


class GraniteMoeHybridPolicy(BambaPolicy, MixturePolicy):
    """Granite 4, whose blocks have an MLP, and some models experts beside it."""

    norms: ClassVar[tuple[str, ...]] = HybridPolicy.norms
    final: ClassVar[str] = HybridPolicy.final
    mixer: ClassVar[str] = "GraniteMoeHybridMambaLayer"
    checks = (*HybridPolicy.checks, Heads("mamba_n_heads", kv="mamba_n_groups", of=mixer))
    mixture: ClassVar[str] = "block_sparse_moe"
    router: ClassVar[str] = "router"
    stages = HybridPolicy.stages

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention or another mixer in a block."""
        mlp = region(enter="shared_mlp", col=segments("shared_mlp.input_linear", 2), row="shared_mlp.output_linear")
        return [mlp, *super().feed_forward()]
