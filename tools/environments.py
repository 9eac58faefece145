"""Environments that share their torch, which is most of their size: on the disk it lies once.

``FOLDER/torch-2.13.0/base`` has pip and torch alone. Every environment beside it starts as a copy of it that is made of
hard links, to which pip adds a release of a library; what pip replaces there stays as it was in the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Environment", "capabilities_here"]


def capabilities_here(processor: Path) -> list[str]:
    """Return the values of ATEN_CPU_CAPABILITY that this machine can run, from what Linux says of its ``processor``."""
    flags = set(processor.read_text().split()) if processor.exists() else set()
    needed = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}}
    return ["default", *(name for name, wanted in needed.items() if wanted <= flags)]


@dataclass(frozen=True)
class Environment:
    """One environment, shared by all packs that are tested in it.

    Attributes:
        name: such as ``transformers-5.0.0``.
        torch: torch and what has to match it, as pins.
        pins: what else is installed in it, besides the packs.
    """

    name: str
    torch: tuple[str, ...]
    pins: tuple[str, ...] = ()

    def make(self, folder: Path, pip: Callable[..., None]) -> Path:
        """Return its interpreter; it is made if it is not there, without its pins.

        Args:
            folder: where all environments are.
            pip: called as ``pip(python, *arguments)`` to install torch.
        """
        siblings = folder / "-".join(pin.replace("==", "-") for pin in self.torch)
        base, own = siblings / "base", siblings / self.name
        if not _python(own).exists():
            if not _python(base).exists():
                _make(base)
            pip(_python(base), "install", *self.torch)
            # The interpreter comes last: what was interrupted before is made anew.
            shutil.rmtree(own, ignore_errors=True)
            shutil.copytree(_packages(base), _packages(own), copy_function=_link, symlinks=True)
            _make(own, "--without-pip")
        return _python(own)


def _make(folder: Path, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=True)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
    return target


def _python(folder: Path) -> Path:
    return _path("scripts", folder) / ("python.exe" if os.name == "nt" else "python")


def _packages(folder: Path) -> Path:
    return _path("purelib", folder)


def _path(kind: str, folder: Path) -> Path:
    return Path(sysconfig.get_path(kind, "venv", {"base": str(folder), "platbase": str(folder)}))
