"""How mixers of Mamba-2 are split in the regions around them: their norms, and the kernels that they do without."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardcore.nn import HeadParameters, NormOverHeads, ParallelMixin
from shardcore.policy import Rule, Scope, Word


class Unfused(ParallelMixin):
    """A mixer that does without the kernel which multiplies by its last linear too.

    A rank has a part of the weight of that, whose products are summed, which the kernel does not. A mixer asks for
    the kernel in training only, and asks nothing else of it.
    """

    keeps_name: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native mixer computes step by step."""
        training, self.training = self.training, False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training


class Multiplied(Unfused):
    """A mixer that multiplies what its first linear makes by numbers that it keeps, of which a rank uses its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native mixer computes of this rank's features."""
        first: Any = self.in_proj
        whole: Any = self.mup_vector
        runs = first.exchange.used if first.exchange else first.rows
        self._buffers["mup_vector"] = torch.cat([whole[..., start:stop] for start, stop in runs], -1)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._buffers["mup_vector"] = whole


class GatedNormOverHeads(NormOverHeads):
    """A root-mean-square norm over the features of all heads, each multiplied by its gate before."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (..., m) for (..., m)."""
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        x = x if gate is None else x * F.silu(gate.to(x.dtype))
        return super().forward(x).to(hidden_states.dtype)


def unfused(*, multiplied: bool = False) -> Rule:
    """Return the rule by which a mixer does without the kernel that computes all of it.

    Args:
        multiplied: its features are multiplied by numbers that it keeps, ``mup_vector``.
    """
    target = Multiplied if multiplied else Unfused
    return Word(text=f"unfused(multiplied={multiplied})", planned=lambda scope: scope.swap("", target))


def gated_norm() -> Rule:
    """Return the rule for the norm over the features of each group of heads, or of all, that are gated before."""

    def plan(scope: Scope) -> None:
        heads, module = scope.heads, scope.find("norm")
        weight = None if module is None else module._parameters.get("weight")
        if heads is None or weight is None:
            return
        groups = _groups(module, len(weight))
        if groups % heads.ranks == 0:
            scope.swap("norm", HeadParameters, names=("weight",))
        elif groups == 1 and not getattr(module, "norm_before_gate", False):
            size = len(weight) // heads.ranks
            used = tuple(((rank * size, (rank + 1) * size),) for rank in range(heads.ranks))
            scope.swap("norm", GatedNormOverHeads, eps="variance_epsilon", used=used)
        else:
            what = f"its norm is over each of {groups} groups, of which {heads.ranks} ranks have parts"
            scope.refuse(what, f"use a tensor_parallel_size that divides {groups}")

    return Word(text="gated_norm()", planned=plan)


def _groups(norm: Any, features: int) -> int:
    """Return how many groups of features have a mean of their own: Bamba's and Granite's had none before 5.23."""
    counted: int | None = getattr(norm, "n_groups", None)
    return features // getattr(norm, "group_size", features) if counted is None else counted
