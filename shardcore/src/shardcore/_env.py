"""The one place that reads the environment.

| variable | read by | meaning |
|---|---|---|
| `SHARDCORE_PACKS` | `packs` | the packs that may load: unset means all, empty means none, else a comma list |
| `SHARDCORE_DISABLE_PACKS` | `disabled_packs` | packs that may not load, a comma list |
| `SHARDCORE_STRICT` | `strict` | `1`: a warning about a pack is an error; `0` (the default): it is not |
| `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` | `torchrun` | what torchrun tells its workers |
| `TORCHELASTIC_USE_AGENT_STORE` | `torchrun` | whether torchrun keeps one store for all restarts |
| `TORCHELASTIC_ERROR_FILE` | `error_file` | where torchrun looks for what ended a rank |
| `OMPI_COMM_WORLD_LOCAL_RANK`, `MPI_LOCALRANKID`, `SLURM_LOCALID` | `torchrun` | what mpirun and srun say |
| `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS`, `ENVIRONMENT` | `torchrun` | the ranks of a job step of srun |
| `SLURM_STEP_NODELIST`, `SLURM_JOB_NODELIST`, `SLURM_JOB_ID`, `SLURM_STEP_ID` | `torchrun` | where they meet |
| `CXX` | `compilers` | the C++ compiler that torch.compile runs on the CPU |

Every reader looks at the environment when it is called; nothing is remembered. This module imports no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from shardcore.errors import ConfigError

# Variables of mpirun and srun: the number of a process on its machine, and its number among all.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
    ("MPI_LOCALRANKID", "PMI_RANK"),
    ("SLURM_LOCALID", "SLURM_PROCID"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunEnv:
    """What torchrun, or whoever sets the same variables, or srun says about this process; None if not given."""

    rank: int  # the number of this process among all, from 0
    world_size: int  # the number of processes
    local_rank: int | None = None  # the number of this process on its machine, from 0
    master_addr: str | None = None  # the host at which the processes meet
    master_port: int | None = None  # the port at which they meet
    exported: bool = False  # whether torch itself finds all of this, but the local rank, in the environment
    restarts_in_place: bool = False  # whether the processes meet where those before a restart have met


def packs() -> frozenset[str] | None:
    """Return the names in `SHARDCORE_PACKS`, or None if it is unset and every pack may load."""
    return _names("SHARDCORE_PACKS")


def disabled_packs() -> frozenset[str]:
    """Return the names in `SHARDCORE_DISABLE_PACKS`."""
    return _names("SHARDCORE_DISABLE_PACKS") or frozenset()


def strict() -> bool:
    """Return whether `SHARDCORE_STRICT` asks for errors in place of warnings."""
    value = os.environ.get("SHARDCORE_STRICT", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"SHARDCORE_STRICT is {value!r}; valid values: '0', '1', or unset (which means '0')")
    return value == "1"


def error_file() -> str | None:
    """Return the file in which torchrun looks for what ended this rank, if there is one."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def torchrun() -> TorchrunEnv | None:
    """Return what torchrun or srun says about this process, or None if it was started by neither."""
    rank, world_size = _integer("RANK", 0), _integer("WORLD_SIZE", 1)
    if rank is None or world_size is None:
        task, tasks = _slurm_task()
        rank, world_size = task if rank is None else rank, tasks if world_size is None else world_size
    if rank is None or world_size is None:
        return None
    if rank >= world_size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {world_size}; valid ranks: 0 to {world_size - 1}")
    address, port = os.environ.get("MASTER_ADDR"), _integer("MASTER_PORT", 0, 65535)
    return TorchrunEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_local_rank(rank),
        master_addr=_first_host() if address is None else address,
        master_port=_port_of_job() if port is None else port,
        exported=all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        restarts_in_place=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm_task() -> tuple[int | None, int | None]:
    """Return this process's number in a job step of srun and the number of its processes, or None for both.

    In a batch script, which is one process, SLURM sets the number of tasks that srun would start.
    """
    task, tasks = _integer("SLURM_PROCID", 0), _integer("SLURM_STEP_NUM_TASKS", 1)
    if tasks is None and os.environ.get("ENVIRONMENT") != "BATCH":
        tasks = _integer("SLURM_NTASKS", 1)
    return (None, None) if task is None or tasks is None else (task, tasks)


def _first_host() -> str | None:
    """Return the first host of the job step, on which srun puts its first process; None outside of SLURM."""
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    # Ranges are in brackets, several at times: gpu[001-004,7]-ib,login.
    match = re.match(r"(?:[^\[\],]|\[\d+[-,\d]*\])+", hosts)
    if match is None:
        raise ConfigError(
            f"the list of hosts {hosts!r} (SLURM_STEP_NODELIST or SLURM_JOB_NODELIST) could not be read; export "
            "MASTER_ADDR, the name of the host on which rank 0 runs"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _port_of_job() -> int | None:
    """Return a port that belongs to this job step as far as ports of jobs differ; None outside of SLURM."""
    job, step = _integer("SLURM_JOB_ID", 0), _integer("SLURM_STEP_ID", 0)
    # Below those that systems hand out by themselves.
    return None if job is None else 20000 + (job + 7 * (step or 0)) % 10000


def _local_rank(rank: int) -> int | None:
    """Return the number of this process on its machine, from whichever launcher says it; None if none does."""
    if (given := _integer("LOCAL_RANK", 0)) is not None:
        return given
    for local, everywhere in _LAUNCHERS:
        # A launcher around the one that started this process leaves variables of its own behind, for all the same.
        if _integer(everywhere, 0) in (None, rank) and (given := _integer(local, 0)) is not None:
            return given
    return None


def compilers() -> tuple[str, ...]:
    """Return the C++ compilers that torch.compile may run: the one in `CXX`, and those that it looks for."""
    named = os.environ.get("CXX")
    return (*((named,) if named else ()), "g++", "clang++")


def _names(variable: str) -> frozenset[str] | None:
    """Return the stripped, non-empty parts of a comma list, or None if the variable is unset."""
    value = os.environ.get(variable)
    if value is None:
        return None
    return frozenset(part.strip() for part in value.split(",") if part.strip())


def _integer(variable: str, lowest: int, highest: int | None = None) -> int | None:
    """Return an integer variable within its bounds (both included), or None if it is unset."""
    value = os.environ.get(variable)
    if value is None:
        return None
    wanted = f"an integer of at least {lowest}" if highest is None else f"an integer from {lowest} to {highest}"
    try:
        number = int(value)
    except ValueError as error:
        raise ConfigError(f"{variable} is {value!r}; wanted {wanted}") from error
    if number < lowest or (highest is not None and number > highest):
        raise ConfigError(f"{variable} is {number}; wanted {wanted}")
    return number
