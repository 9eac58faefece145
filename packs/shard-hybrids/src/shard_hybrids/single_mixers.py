"""How decoders are sharded whose blocks have one mixer each: Nemotron-H, Mamba-2."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_hybrids.mamba2 import BambaPolicy
from shard_hybrids.policy import HybridPolicy
from shardcore.policy import Check, Heads, Rule
from shardcore.styles import attribute, experts, local_groups, norm, outputs, partial, region, sequence, vocab


class NemotronHPolicy(BambaPolicy):
    """Nemotron-H: the mixer of a block is one of Mamba-2, an attention, an MLP without a gate, or experts."""

    norms: ClassVar[tuple[str, ...]] = ("norm",)
    final: ClassVar[str] = "norm_f"
    sizes: ClassVar[tuple[str, str]] = ("mamba_head_dim", "ssm_state_size")
    mixer: ClassVar[str] = "NemotronHMamba2Mixer"
    checks: ClassVar[tuple[Check, ...]] = (
        *HybridPolicy.checks,
        Heads("mamba_num_heads", kv="n_groups", of="NemotronHMamba2Mixer"),
    )
    stages = replace(HybridPolicy.stages, first="embeddings", last="norm_f", everywhere=())

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [
            vocab("embeddings"),
            norm(self.final, rms=self.rms),
            sequence(scatter="layers[0]", gather=self.final),
            self.captured(),
        ]

    def captured(self) -> Rule:
        """Return the rule of what can be asked for."""
        return outputs(attentions="heads", hidden_states="sequence")

    def attention(self) -> list[Rule]:
        """Return the rules of a mixer that is an attention."""
        q, k, v = (f"mixer.{name}_proj" for name in "qkv")
        return [
            region(enter="mixer", col=q, kv=(k, v), row="mixer.o_proj", unit="head", optional=True),
            attribute("mixer.num_key_value_groups", local_groups, optional=True),
        ]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of a mixer that is an MLP, or experts.

        Experts may see a smaller state of each token. What is made large again are summands of this rank, which are
        added up with all that the experts return.
        """
        return [
            region(enter="mixer", col="mixer.up_proj", row="mixer.down_proj", optional=True),
            experts(
                "mixer",
                captured=0,
                shared_col="shared_experts.up_proj",
                shared_row="shared_experts.down_proj",
                optional=True,
            ),
            partial("mixer.fc1_latent_proj", "mixer.fc2_latent_proj", optional=True),
        ]


class Mamba2Policy(NemotronHPolicy):
    """Mamba-2, whose blocks have no other mixer."""

    sizes: ClassVar[tuple[str, str]] = ("head_dim", "state_size")
    mixer: ClassVar[str] = "Mamba2Mixer"
    checks: ClassVar[tuple[Check, ...]] = (Heads("num_heads", kv="n_groups"),)

    def captured(self) -> Rule:
        """Return the rule of what can be asked for."""
        return outputs(hidden_states="sequence")

    def attention(self) -> list[Rule]:
        """Return no rules: there is none."""
        return []

    def feed_forward(self) -> list[Rule]:
        """Return no rules: there is none."""
        return []
