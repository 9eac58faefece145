"""``shardcore doctor``: what this machine has, and what will work on it."""

from __future__ import annotations

import os
import platform
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


def examine() -> dict[str, Any]:
    """Return versions, and checks with a state (``works``, ``missing``, ``fails`` or ``not tried``) and the reason."""
    versions = {"python": platform.python_version(), "shardcore": shardcore.__version__}
    versions |= {name: _version(name) for name in _LIBRARIES}
    return {"versions": versions, "checks": list(_checks())}


def _version(name: str) -> str:
    return installed(name) or "not installed"


def _checks() -> Iterator[dict[str, str]]:
    """Yield every finding; what is broken is one of them, and hides no other."""
    failure = torch_failure()
    if failure is None:
        try:
            findings = list(_of_torch())
        except Exception as error:  # a torch that imports and does not work
            findings, failure = [], in_one_line(error)
        yield from findings
    if failure is not None:
        yield _finding("torch", "fails", f"{failure}; install a torch that works here")
    yield from (_pack(row, works=failure is None) for row in describe())


def _of_torch() -> Iterator[dict[str, str]]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if dist.is_available():
        yield _finding("gloo", *_backend(dist.is_gloo_available(), "tensor parallelism on CPUs"))
        nccl = _backend(dist.is_nccl_available(), "tensor parallelism on NVIDIA GPUs")
        no_device = ("missing", "this torch was built with the backend, but there is no CUDA device here")
        yield _finding("nccl", *(nccl if count or nccl[0] == "missing" else no_device))
    else:
        yield _finding("torch.distributed", "fails", "this torch was built without it; install another build of torch")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    yield _finding("CUDA devices", "works" if count else "missing", f"{count} {names}".strip())
    cores = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    advice = f"OMP_NUM_THREADS is {threads}" if threads else "set OMP_NUM_THREADS so that ranks do not compete for them"
    yield _finding("CPU cores", "works", f"{cores}; {advice}")
    yield _attention(count)
    yield from _of_release(torch.__version__)


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


def _attention(devices: int) -> dict[str, str]:
    found = installed("flash-attn") is not None
    if found and devices:
        return _finding("flash attention", "works", "attn_implementation='flash_attention_2'")
    reason = "needs a CUDA device" if found else "flash-attn is not installed"
    return _finding("flash attention", "missing", f"{reason}; sdpa and eager attention work")


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
