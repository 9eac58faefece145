"""Reading the files of checkpoints."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

__all__ = ["read_tensors"]


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.safetensors`` file by name."""
    return load_file(file)
