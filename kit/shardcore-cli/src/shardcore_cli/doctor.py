"""``shardcore doctor``: what this machine has, and what will work on it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import click

import shardcore
from shardcore.plugins.isolation import in_one_line
from shardcore.plugins.versions import installed
from shardcore_cli.packs import describe
from shardcore_cli.surroundings import torch_failure
from shardcore_cli.tables import show_table

_LIBRARIES = ("torch", "transformers", "timm", "accelerate", "flash-attn", "pluggy", "safetensors")
#: Distribution -> the cards that it runs on, by the first number of their compute capability.
_FLASH = {"flash-attn": (8, 9, 10, 12), "flash-attn-3": (9,), "flash-attn-4": (9, 10)}
_LIMIT = 60  # seconds of the trial


def examine(*, trial: bool = False) -> dict[str, Any]:
    """Return versions, and checks with a state (``works``, ``missing``, ``fails`` or ``not tried``) and the reason."""
    versions = {"python": platform.python_version(), "shardcore": shardcore.__version__}
    return {"versions": versions | {name: _version(name) for name in _LIBRARIES}, "checks": list(_checks(trial))}


def _version(name: str) -> str:
    return installed(name) or "not installed"


def _checks(trial: bool) -> Iterator[dict[str, str]]:
    """Yield every finding; what is broken is one of them, and hides no other."""
    failure = torch_failure()
    if failure is None:
        try:
            findings = list(_of_torch(trial))
        except Exception as error:  # a torch that imports and does not work
            findings, failure = [], in_one_line(error)
        yield from findings
    if failure is not None:
        yield _finding("torch", "fails", f"{failure}; install a torch that works here")
    if importlib.util.find_spec("shardcore_scaffold"):
        yield _finding("inferred policies", "works", importlib.import_module("shardcore_scaffold.kept").said())
    yield from (_pack(row, works=failure is None) for row in describe())


def _of_torch(trial: bool) -> Iterator[dict[str, str]]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if dist.is_available():
        yield _finding("gloo", *_backend(dist.is_gloo_available(), "tensor parallelism on CPUs"))
        version = f", version {torch.cuda.nccl.version()}" if count and dist.is_nccl_available() else ""
        nccl = _backend(dist.is_nccl_available(), f"tensor parallelism on NVIDIA GPUs{version}")
        no_device = ("missing", "this torch was built with the backend, but there is no CUDA device here")
        yield _finding("nccl", *(nccl if count or nccl[0] == "missing" else no_device))
    else:
        yield _finding("torch.distributed", "fails", "this torch was built without it; install another build of torch")
    yield from _of_cards([torch.cuda.get_device_properties(i) for i in range(count)])
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    advice = f"OMP_NUM_THREADS is {threads}" if threads else "set OMP_NUM_THREADS so that ranks do not compete for them"
    yield _finding("CPU cores", "works", f"{cores}; {advice}")
    yield from _of_release(torch.__version__)
    if trial and dist.is_available():
        yield _finding("an all-reduce", *try_all_reduce(count))


def _of_release(version: str) -> Iterator[dict[str, str]]:
    """Yield what the installed release of torch has, and what is lost with what it lacks."""
    from shardcore._private import ABILITIES, CORE, DATA_PARALLEL, FUSED, SAVING, complaint, missing

    gone = missing(CORE, DATA_PARALLEL, SAVING)
    there = "all that shardcore uses are there"
    yield _finding("names of torch", "fails" if gone else "works", complaint(gone) if gone else there)
    if gone := missing(FUSED):
        lost = "models in which one linear computes several projections are refused"
        yield _finding("fused column linears", "missing", f"{lost}: {complaint(gone)}")
    else:
        yield _finding("fused column linears", "works", "one weight for several projections")
    for ability in ABILITIES:
        lost = f"torch {version} is older than {ability.since}: {ability.lost}"
        there = f"since torch {ability.since}"
        yield _finding(ability.what, *(("works", there) if ability.is_there() else ("missing", lost)))


def _backend(available: bool, purpose: str) -> tuple[str, str]:
    return ("works", purpose) if available else ("missing", f"no {purpose}: this torch was built without the backend")


def _of_cards(cards: list[Any]) -> Iterator[dict[str, str]]:
    """Yield what there is of cards, whose properties are given, and what works on the oldest of them."""
    names = sorted({f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards})
    yield _finding("CUDA devices", "works" if cards else "missing", f"{len(cards)} {', '.join(names)}".strip())
    oldest = min([(card.major, card.minor) for card in cards], default=(0, 0))
    here = "compute capability {}.{}".format(*oldest) if cards else "needs a CUDA device"
    for name, fits in _FLASH.items():
        works, why = bool(installed(name)) and oldest[0] in fits, f"{_version(name)}, {here}"
        yield _finding(name, *(("works", why) if works else ("missing", f"{why}; sdpa and eager attention work")))
    try:
        works, why = bool(cards), f"triton {importlib.import_module('triton').__version__}, {here}"
    except Exception as error:
        works, why = False, f"{in_one_line(error)}, {here}"
    yield _finding("torch.compile on cards", "works" if works else "missing", why)
    yield _finding("fp8", "works" if oldest >= (8, 9) else "missing", f"{here}; 8.9 or more is needed")


def try_all_reduce(cards: int) -> tuple[str, str]:
    """Return the state and the reason of a sum over all cards, or over two processes on the CPU; takes some seconds."""
    from torch.multiprocessing.spawn import spawn

    backend, ranks = "nccl" if cards else "gloo", cards or 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_add, (ranks, backend, f"file://{folder}/store"), ranks)
    except Exception as error:
        return "fails", f"{backend}, ranks: {ranks}, limit: {_LIMIT} s; {str(error).strip().splitlines()[-1]}"
    return "works", f"{backend}, ranks: {ranks}"


def _add(rank: int, ranks: int, backend: str, where: str) -> None:
    import torch
    import torch.distributed as dist

    signal.alarm(_LIMIT)  # ends this process, whatever it waits for
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    value = torch.full((), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != ranks * (ranks + 1) / 2:
        raise RuntimeError(f"1 to {ranks} came to {value.item()} on rank {rank}")
    dist.destroy_process_group()


def _pack(row: dict[str, Any], *, works: bool) -> dict[str, str]:
    """Return what is known of a pack; ``works`` says whether torch does."""
    name = f"pack {row['name']} ({row['distribution']} {row['version']})"
    if row["error"]:
        return _finding(name, "fails", row["error"])
    if row["status"] == "blocked":
        return _finding(name, "missing", "blocked by SHARDCORE_PACKS or SHARDCORE_DISABLE_PACKS")
    count = len(row["classes"])
    notes = [note for t in row["tested"] if (note := _note(t))]
    lacks = any(t["installed"] is None and not t["optional"] for t in row["tested"])
    state = "missing" if lacks else "works" if works else "not tried"
    said = [f"{count} class{'es' * (count != 1)}", *notes]
    return _finding(name, state, "; ".join(said if works else ["torch fails", *said]))


def _note(found: dict[str, Any]) -> str | None:
    """Return what is to be said about a library that a pack was tested with."""
    if found["installed"] is None:
        return f"{found['library']} is {'optional, ' * found['optional']}not installed"
    if found["inside"]:
        return None
    return f"{found['library']} {found['installed']} is outside the tested range {found['range']}"


def _finding(what: str, state: str, why: str) -> dict[str, str]:
    return {"what": what, "state": state, "why": why}


def show(findings: dict[str, Any]) -> None:
    """Print the findings as two tables."""
    show_table("versions", ("library", "version"), list(findings["versions"].items()))
    click.echo()
    show_table("checks", ("what", "state", "why"), [(f["what"], f["state"], f["why"]) for f in findings["checks"]])
