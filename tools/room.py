"""Room on the disk for a run of all sessions: one that fills it ends in the middle, and cannot even say so."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["lacking"]

#: What pip unpacks and tests write beside the environments, in bytes.
_BESIDE = 1e9


def lacking(environments: Path, needs: float) -> str:
    """Return what to say of a disk that has too little room; "" where there is enough.

    Args:
        environments: the folder of the environments, some of which may be there already.
        needs: what all of them take, in bytes.
    """
    made = sum(_size(Path(folder) / file) for folder, _, files in os.walk(environments) for file in files)
    needed = {_existing(environments): max(needs - made, 0.0)}
    scratch = Path(tempfile.gettempdir())
    same = next((place for place in needed if place.stat().st_dev == scratch.stat().st_dev), scratch)
    needed[same] = needed.get(same, 0.0) + _BESIDE
    for place, wanted in needed.items():
        if (free := shutil.disk_usage(place).free) < wanted:
            return (
                f"the environments and what tests write need about {wanted / 1e9:.0f} GB more on the disk of {place}, "
                f"which has {free / 1e9:.1f} GB free. Make room there (.nox/environments of other checkouts are as "
                "large), set TMPDIR to a folder on another disk, or run single sessions: nox --list"
            )
    return ""


def _size(file: Path) -> int:
    return file.lstat().st_size


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())
