"""The word for torch's own attention, whose parameters are bare."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from shardcore.nn import RowLinear
from shardcore.nn.attention import Of, SplitAttention, output_options
from shardcore.policy import Rule, Scope
from shardcore.styles._text import written

__all__ = ["attention"]


def attention(name: str, *, of: Of = "any", optional: bool = False) -> Rule:
    """Split a `torch.nn.MultiheadAttention` by its heads; the ranks need not divide their number.

    It is a region of its own: what it attends to enters at its call, and its output is summed.

    Args:
        name: the module.
        of: what every call attends to. ``"self"``: query, key and value are one tensor, which enters once.
            ``"memory"``: key and value are one tensor that every rank has whole; it enters here, or below a
            `torch.nn.TransformerDecoder` once for all of its layers. ``"any"``: each of the three enters by itself; not
            where tokens are split.
        optional: it may be absent.
    """
    text = written("attention", name, of=None if of == "any" else of)
    return AttentionRule(text=text, optional=optional, name=name, of=of)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule(Rule):
    """`shardcore.styles.attention`."""

    name: str
    of: Of

    @override
    def plan(self, scope: Scope) -> None:
        module = scope.find(self.name)
        if module is None:
            return
        scope.swap(self.name, SplitAttention, of=self.of, entered=self._entered(scope))
        out = ".".join(filter(None, (self.name, "out_proj")))
        if not isinstance(module, nn.MultiheadAttention) or module.num_heads < scope.ranks:
            for parameter in module.get_submodule("out_proj")._parameters if hasattr(module, "out_proj") else ():
                scope.claim(out, parameter, None)  # said already: not "covered by no rule" too
            return
        scope.swap(out, RowLinear, **output_options(module, scope.ranks))

    def _entered(self, scope: Scope) -> bool:
        return self.of == "memory" and any(isinstance(m, nn.TransformerDecoder) for _, m in scope.above())
