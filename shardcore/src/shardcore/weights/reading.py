"""Who reads what from the files of a checkpoint: every rank its slices, or one rank of each host for all of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardcore.errors import ConfigError
from shardcore.mesh import device_type_of

__all__ = ["Reading", "check_reading", "neighbours_on_host", "on_network", "scatters"]

#: ``"slices"``: every rank reads its parts; ``"scatter"``: one rank of each host reads and sends the others theirs;
#: ``"auto"``: the second where the files are on a network file system.
Reading: TypeAlias = Literal["auto", "slices", "scatter"]

#: File systems whose files are on another machine, by the names that the kernel has for them.
_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "panfs",
     "pvfs2", "smb3", "smbfs", "wekafs"}
)  # fmt: skip
_FUSE = "fuse."  # programs that show what is elsewhere: object stores, ssh, JuiceFS; local disks are "fuseblk"

_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_reading(reading: object) -> Reading:
    """Return ``reading`` if it is one of the ways.

    Raises:
        ConfigError: it is none.
    """
    if reading not in get_args(Reading):
        raise ConfigError(f"reading= must be one of {', '.join(map(repr, get_args(Reading)))}, got {reading!r}")
    return cast("Reading", reading)


def scatters(reading: Reading, files: Iterable[Path], group: ProcessGroup | None) -> bool:
    """Decide, on all ranks of ``group`` alike, whether one rank of each host reads for the others."""
    if reading != "auto":
        return reading == "scatter"
    found = torch.tensor([int(on_network(files))], dtype=torch.int32, device=device_type_of(group))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)  # hosts may have mounted different things at one path
    return bool(found.item())


def neighbours_on_host(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of ``group`` that run on this host, itself among them, in order."""
    known: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(known, _host(), group=group)
    ranks = dist.get_process_group_ranks(group)
    return sorted(rank for rank, host in zip(ranks, known, strict=True) if host == _host())


def _host() -> str:
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"  # containers of one machine have names of their own, and files of their own


def on_network(files: Iterable[Path]) -> bool:
    """Tell whether one of ``files`` is on a network file system, as far as the system says."""
    try:
        mounts = _mounts(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
        folders = {file.resolve().parent for file in files}  # the cache of the hub links to its files
    except OSError:
        return False
    kinds = {_kind(folder, mounts) for folder in folders}
    return any(kind in _NETWORK or kind.startswith(_FUSE) for kind in kinds)


def _mounts(table: str) -> list[tuple[Path, str]]:
    """Return the mount points of ``mountinfo`` with their kinds, in the order in which they were mounted."""
    found = []
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
            found.append((Path(point), after.split()[0]))
    return found


def _kind(folder: Path, mounts: Sequence[tuple[Path, str]]) -> str:
    """Return the kind of the file system that ``folder`` is on; of several mounts at one point the last one counts."""
    best, kind = -1, ""
    for point, name in mounts:
        if len(point.parts) >= best and folder.is_relative_to(point):
            best, kind = len(point.parts), name
    return kind
