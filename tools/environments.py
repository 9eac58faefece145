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

from filelock import FileLock  # virtualenv's, which nox brings

__all__ = ["BACKEND", "Environment", "capabilities_here", "find_python"]

# Builds core and packs: it is there, so that not every installation fetches it into an environment for the build.
BACKEND = "hatchling>=1.27"
# The folder of an environment, for paths that are relative to it.
_BELOW = {"base": ".", "platbase": "."}


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
        torch: torch and what has to match it, as pins; empty for tools that need no torch.
        pins: what else is installed in it, besides the packs.
        python: the interpreter that it is made with; None for the one that runs nox.
    """

    name: str
    torch: tuple[str, ...]
    pins: tuple[str, ...] = ()
    python: str | None = None

    def make(self, folder: Path, pip: Callable[..., None]) -> Path:
        """Return its interpreter; it is made if it is not there, without its pins.

        Args:
            folder: where all environments are.
            pip: called as ``pip(python, *arguments)`` to install torch.
        """
        version = [] if self.python is None else [Path(self.python).name]
        siblings = folder / ("-".join([*version, *(pin.replace("==", "-") for pin in self.torch)]) or "no-torch")
        base, own = siblings / "base", siblings / self.name
        siblings.mkdir(parents=True, exist_ok=True)
        # Sessions that run side by side share the base.
        with FileLock(siblings / ".lock"):
            if not _python(own).exists():
                if not _python(base).exists():
                    _make(self.python or sys.executable, base)
                if self.torch:
                    pip(_python(base), "install", *self.torch, BACKEND)
                # The interpreter comes last: what was interrupted before is made anew.
                shutil.rmtree(own, ignore_errors=True)
                packages = self._packages()
                shutil.copytree(base / packages, own / packages, copy_function=_link, symlinks=True)
                _make(self.python or sys.executable, own, "--without-pip")
        return _python(own)

    def _packages(self) -> str:
        """Return where the interpreter keeps packages, below the folder of an environment."""
        if self.python is None:
            return sysconfig.get_path("purelib", "venv", _BELOW)
        code = f"import sysconfig; print(sysconfig.get_path('purelib', 'venv', {_BELOW}))"
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as ``3.13`` that starts; None if this machine has none.

    Looked for: ``pythonX.Y`` on the path, and the versions that pyenv has installed. A name on the path may be a shim
    that starts nothing, so each is asked for its version.
    """
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(str(python) for python in root.glob(f"versions/{version}.*/bin/python{version}"))
    found = [shutil.which(f"python{version}"), *kept]
    return next((python for python in found if python is not None and _is(python, version)), None)


def _is(python: str, version: str) -> bool:
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def _make(python: str, folder: Path, *options: str) -> None:
    subprocess.run([python, "-m", "venv", *options, str(folder)], check=True)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
    return target


def _python(folder: Path) -> Path:
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(folder), "platbase": str(folder)})
    return Path(scripts) / ("python.exe" if os.name == "nt" else "python")
