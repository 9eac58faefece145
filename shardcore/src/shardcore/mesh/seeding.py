"""Noticing that the user has called ``torch.manual_seed``, which cannot be seen in the state of a generator.

Who seeds torch again, by `transformers.set_seed` for instance, expects the same masks and samples again. A sharded
model draws from a stream of its own, so torch's function is wrapped, for the whole process, by one that counts its
calls; streams compare the count with the one that they have seen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["install", "times_seeded", "uncounted_seed"]

_NATIVE = torch.manual_seed
_COUNT = "_shardcore_times_seeded"


def install() -> None:
    """Count calls of ``torch.manual_seed`` from here on; the first call acts, the others do nothing."""
    if hasattr(torch.random, _COUNT):
        return
    setattr(torch.random, _COUNT, 0)

    @functools.wraps(_NATIVE)
    def manual_seed(seed: Any) -> torch.Generator:
        generator = _NATIVE(seed)
        setattr(torch.random, _COUNT, times_seeded() + 1)
        return generator

    # Both names, so that the function can still be pickled.
    torch.manual_seed = torch.random.manual_seed = manual_seed


def times_seeded() -> int:
    """Return how often the user has seeded torch since `install`."""
    count: int = getattr(torch.random, _COUNT, 0)
    return count


def uncounted_seed(seed: int) -> None:
    """Seed torch's generators as part of something else, that puts them back."""
    _NATIVE(seed)
