"""How Zamba 2 is sharded: mixers of Mamba-2 in all blocks, and in front of some of them a block that they share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from shard_hybrids.mamba2 import BambaPolicy
from shard_hybrids.policy import HybridPolicy
from shardcore.policy import Check, Heads, ModulePolicy, Rule
from shardcore.styles import attribute, local_groups, norm, outputs, partial, region, replicate, segments, vocab


class Zamba2Policy(BambaPolicy):
    """Zamba 2: the shared blocks have one weight, and small linears of their own for each place where they are used.

    They read the embedded words beside the states, which are whole on every rank.
    """

    final: ClassVar[str] = "final_layernorm"
    sizes: ClassVar[tuple[str, str]] = ("mamba_headdim", "mamba_d_state")
    mixer: ClassVar[str] = "Zamba2MambaMixer"
    checks: ClassVar[tuple[Check, ...]] = (
        *HybridPolicy.checks,
        Heads("n_mamba_heads", kv="mamba_ngroups", of="Zamba2MambaMixer"),
    )
    stages = replace(HybridPolicy.stages, last="final_layernorm", optional="rotary_emb")

    @override
    def module_policy(self) -> ModulePolicy:
        places = [block for block in self.base.layers if hasattr(block, "shared_transformer")]
        return {
            self.base: self.decoder(),
            "Zamba2MambaDecoderLayer": [norm("input_layernorm", rms=self.rms)],
            self.mixer: self.mixing(),
            **{place: [replicate("linear")] for place in places},
            **{place.shared_transformer: self.shared(place.shared_transformer) for place in places},
            **self.heads(),
        }

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [vocab("embed_tokens"), norm(self.final, rms=self.rms), outputs(attentions="heads")]

    def shared(self, block: Any) -> list[Rule]:
        """Return the rules of a shared block: what goes through a small linear is added to what a large one makes."""
        queries, *others = (_pairs(block, f"self_attn.linear_{name}_adapter_list") for name in "qkv")
        keys, mlp = (*others[0], *others[1]), _pairs(block, "feed_forward.gate_up_proj_adapter_list")
        large = tuple(segments(name, 2) for name in ("feed_forward.gate_up_proj", *_ends(mlp)))
        return [
            norm("input_layernorm", "pre_ff_layernorm", rms=self.rms),
            region(
                enter="self_attn",
                col=("self_attn.q_proj", *_ends(queries)),
                kv=("self_attn.k_proj", "self_attn.v_proj", *_ends(keys)),
                row="self_attn.o_proj",
                unit="head",
            ),
            attribute("self_attn.num_key_value_groups", local_groups),
            region(enter="feed_forward", col=large, row="feed_forward.down_proj"),
            partial(*(f"{pair}.0" for pair in (*queries, *keys, *mlp))),
        ]


def _pairs(block: Any, place: str) -> tuple[str, ...]:
    """Return the names of the pairs of linears in a list, one for each place where this block is the shared one."""
    owner, _, name = place.rpartition(".")
    listed = getattr(block.get_submodule(owner), name, ())
    return tuple(f"{place}.{i}" for i, pair in enumerate(listed) if any(True for _ in pair.children()))


def _ends(pairs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of their second linears."""
    return tuple(f"{pair}.1" for pair in pairs)
