"""Checks of how experts compute where nobody says it: as their library does by default, in its usual dtype."""

from __future__ import annotations

import copy
from typing import Any

import torch

from shardcore_testing.findings import Ledger, difference
from shardcore_testing.islands import default_dtype
from shardcore_testing.parity import gradient_errors
from shardcore_testing.subject import Subject

#: Widths of experts by the names that configurations have for them: rows of a multiple of 16 bytes in float32, which
#: products of all experts at once want, and no half, third or quarter of them is one.
_WIDTH = {"intermediate_size": 44, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 44}
_TOLERANCE = 1e-4  # float32, and gradients relative to the largest


def default_experts(s: Subject, ledger: Ledger) -> None:
    """A mixture in float32, whose experts compute as its library has them do by default: outputs, loss, gradients."""
    with ledger.check("default experts"), default_dtype(torch.float32):  # in float64 nothing else is left of it
        if not s.case.supports.experts:
            ledger.closed("experts")
            return
        config = s.build().config
        if not hasattr(config, "_experts_implementation"):
            ledger.closed("its experts compute in one way")
            return
        reference = s.build(**{name: width for name, width in _WIDTH.items() if hasattr(config, name)}).float()
        reference.config._experts_implementation = _default(reference)
        model = s.shard(copy.deepcopy(reference))
        like = next(reference.parameters())  # a dtype by its name would stay float64 where there are no islands
        inputs = {
            name: value.to(like) if value.is_floating_point() else value for name, value in s.inputs(reference).items()
        }
        wanted, got = reference(**inputs), model(**inputs)
        for name in s.case.outputs:
            ledger.error(name, difference(wanted[name], got[name]), tolerance=_TOLERANCE)
        losses = s.loss(wanted), s.loss(got)
        ledger.error("loss", difference(*losses), tolerance=_TOLERANCE)
        for loss in losses:
            loss.backward()
        for name, error in gradient_errors(reference, model).items():
            ledger.error(name, error, tolerance=_TOLERANCE)


def _default(model: Any) -> str:
    """Return how the experts of a model compute that was built without a word about it."""
    config = copy.deepcopy(model.config)
    config._experts_implementation = None
    with torch.device("meta"):
        chosen: str = type(model)(config).config._experts_implementation
    return chosen
