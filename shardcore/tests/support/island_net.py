"""The net of the kit with a norm that is computed in float32 whatever its dtype."""

from __future__ import annotations

from typing import Any

import kit_net
import torch
import torch.nn.functional as F
from kit_net import Decoder, NetPolicy, build
from torch import Tensor

from shardcore.policy import ModulePolicy
from shardcore_testing import Case


class InSinglePrecision(Decoder):
    """Its norm is computed in float32, as those of many models."""

    def forward(self, x: Tensor, memory: Tensor, past: Any = None) -> Any:
        out, *rest = super().forward(x, memory, past)
        inside = out.float()
        if x.dtype is torch.float64 and inside.dtype is not torch.float64:
            raise TypeError("a float64 model computes in float32")
        return F.layer_norm(inside, out.shape[-1:]).to(x.dtype), *rest


def build_with_an_island(**options: Any) -> kit_net.Net:
    model = build(**options)
    model.decoder.__class__ = InSinglePrecision
    return model


class InSinglePrecisionPolicy(NetPolicy):
    def module_policy(self) -> ModulePolicy:
        description = dict(super().module_policy())
        description["InSinglePrecision"] = description.pop("Decoder")
        return description


CASE = Case(name="island", build=build_with_an_island, inputs=kit_net.inputs, policy=InSinglePrecisionPolicy)
