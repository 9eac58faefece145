"""What stacks of the software of clients cannot do together, whatever shardcore does; and what only the night has."""

from __future__ import annotations

from collections.abc import Container, Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

#: transformers 5.24 takes adapters by `add_adapter` from PEFT 0.22 on alone, and calls prefixes by another name.
ADAPTERS = pytest.mark.skipif(
    Version(version("transformers")) >= Version("5.24") and Version(version("peft")) < Version("0.22"),
    reason="transformers 5.24 needs PEFT 0.22, which is not released",
)


def by_night(names: Iterable[Any], but: Container[Any]) -> list[Any]:
    """Return parameters of which the quick run has some alone."""
    return [name if name in but else pytest.param(name, marks=pytest.mark.nightly) for name in names]
