"""The word for norms over the features of all heads."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from shardcore.nn.over_heads import NormOverHeads
from shardcore.policy import Rule, Scope
from shardcore.styles._text import written
from shardcore.styles.columns import Order, Role

__all__ = ["norm_over_heads"]


def norm_over_heads(*names: str, rms: str, of: Role = "query", optional: bool = False) -> Rule:
    """Root-mean-square norms over the features of all heads at once, inside of a region (OLMo 2).

    The squares are summed over the ranks, one number for each token. A norm over the features of each head apart is
    `partial`.

    Args:
        *names: the norms.
        rms: the attribute with epsilon; the norm computes ``weight * x / sqrt(mean(x**2) + eps)``.
        of: what they normalize: ``"query"``, or ``"key"`` (or ``"value"``), of which there may be fewer heads.
        optional: they may be absent.
    """
    text = written("norm_over_heads", *names, rms=rms, of=None if of == "query" else of)
    return NormOverHeadsRule(text=text, optional=optional, names=names, rms=rms, of=of)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOverHeadsRule(Rule):
    """`shardcore.styles.norm_over_heads`."""

    names: tuple[str, ...]
    rms: str
    of: Role

    @override
    def plan(self, scope: Scope) -> None:
        for name in self.names:
            module = scope.find(name)
            weight = None if module is None else module._parameters.get("weight")
            if module is None or (heads := scope.heads) is None:
                continue
            count = heads.query if self.of == "query" else heads.kv
            if weight is not None and weight.numel() % count:
                what = f"its {weight.numel()} features are not whole heads: the configuration counts {count}"
                scope.problem(what, "check Heads(...) in the policy's checks, or of=", name)
                scope.claim(name, "weight", None)
            else:
                used = () if weight is None else Order((self.of,)).rows(weight.numel(), heads)
                scope.swap(name, NormOverHeads, eps=self.rms, used=used)
