"""How MiniMax is sharded: lightning attention, whose heads forget at their own speed, in many of its blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from shard_hybrids.policy import HybridPolicy
from shard_llama.mixtures import MixturePolicy
from shardcore.nn import ParallelMixin
from shardcore.policy import Rule, Word
from shardcore.styles import attribute, local_groups, local_heads, norm_over_heads, refuse, region, segments


class MiniMaxPolicy(HybridPolicy, MixturePolicy):
    """MiniMax, with experts in every block."""

    mixer: ClassVar[str] = "MiniMaxLightningAttention"

    def attention(self) -> list[Rule]:
        """Return the rules of an attention with a softmax; a lightning attention has the same name in its block."""
        *rules, _ = super().attention()
        return [*rules, attribute("self_attn.num_key_value_groups", local_groups, optional=True)]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the experts of a block."""
        jitter = "router_jitter_noise changes what entered the experts in place, which autograd refuses"
        return [*super().feed_forward(), refuse(_jitters, jitter, todo="set router_jitter_noise=0")]

    def mixing(self) -> list[Rule]:
        """Return the rules of a lightning attention: a gate for all that the heads return, and a norm over it."""
        columns = (segments("qkv_proj", 3, by="head"), "output_gate")
        return [
            region(enter="", col=columns, row="out_proj", unit="head"),
            norm_over_heads("norm", rms="variance_epsilon"),
            attribute("num_attention_heads", local_heads),
            Word(text="decays()", planned=lambda scope: scope.swap("", OwnDecays)),
        ]


class OwnDecays(ParallelMixin):
    """A lightning attention that reads, of what it keeps for all heads, what is this rank's heads'.

    Those are buffers, which a checkpoint has whole. Every rank has equally many heads.
    """

    keeps_name: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native attention computes with its heads."""
        heads: Any = self.num_attention_heads
        context: Any = self._shard_context
        names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        whole: dict[str, Any] = {name: self._buffers[name] for name in names}
        first = context.rank * heads
        self._buffers.update({name: decays.narrow(-3, first, heads) for name, decays in whole.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._buffers.update(whole)


def _jitters(block: Any) -> bool:
    return bool(block.mlp.jitter_noise > 0)
