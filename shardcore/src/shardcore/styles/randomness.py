"""Words for modules that draw the same random numbers on all ranks."""

from __future__ import annotations

from shardcore.nn import SharedNumpy, SharedRandom
from shardcore.policy import Rule
from shardcore.styles._text import written
from shardcore.styles.layers import SwapRule

__all__ = ["shared_numpy", "shared_rng"]


def shared_rng(*names: str, optional: bool = False) -> Rule:
    """Modules that draw the same random numbers on all ranks inside regions too (dropping whole samples or paths)."""
    return SwapRule(text=written("shared_rng", *names), optional=optional, names=names, target=SharedRandom)


def shared_numpy(*methods: str) -> Rule:
    """Methods that draw from numpy's global generator (masks of SpecAugment): the same numbers on all ranks.

    They are those of the module that the rule is listed under. `shardcore.manual_seed` reaches them, numpy's own seed
    does not.
    """
    text = written("shared_numpy", *methods)
    return SwapRule(text=text, names=("",), target=SharedNumpy, options=(("methods", methods),))
