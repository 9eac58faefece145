"""What stacks of the software of clients cannot do together, whatever shardcore does."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

#: transformers 5.24 takes adapters by `add_adapter` from PEFT 0.22 on alone, and calls prefixes by another name.
ADAPTERS = pytest.mark.skipif(
    Version(version("transformers")) >= Version("5.24") and Version(version("peft")) < Version("0.22"),
    reason="transformers 5.24 needs PEFT 0.22, which is not released",
)
