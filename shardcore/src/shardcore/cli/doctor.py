"""``shardcore doctor``: what this machine has, and what will work on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import click
import importlib_metadata

import shardcore
from shardcore.cli.packs import describe
from shardcore.cli.tables import show_table

__all__ = ["examine", "show"]

_LIBRARIES = ("torch", "transformers", "timm", "accelerate", "flash-attn", "pluggy", "safetensors")


def examine() -> dict[str, Any]:
    """Return versions, and checks with a state of ``works``, ``missing`` or ``fails`` and the reason."""
    versions = {"python": platform.python_version(), "shardcore": shardcore.__version__}
    versions |= {name: _version(name) for name in _LIBRARIES}
    return {"versions": versions, "checks": list(_checks())}


def _version(name: str) -> str:
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return "not installed"


def _checks() -> Iterator[dict[str, str]]:
    import torch
    import torch.distributed as dist

    from shardcore.comm.strided import torch_lacks

    if not dist.is_available():
        yield _finding("torch.distributed", "fails", "this torch was built without it; install another build of torch")
        return
    yield _finding("gloo", *_backend(dist.is_gloo_available(), "tensor parallelism on CPUs"))
    yield _finding("nccl", *_backend(dist.is_nccl_available(), "tensor parallelism on NVIDIA GPUs"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    yield _finding("CUDA devices", "works" if count else "missing", f"{count} {names}".strip())
    cores = os.cpu_count() or 1
    yield _finding("CPU cores", "works", f"{cores}; set OMP_NUM_THREADS so that ranks do not compete for them")
    yield _attention(count)
    lacks = torch_lacks()
    yield _finding(
        "fused column linears", "missing" if lacks else "works", lacks or "one weight for several projections"
    )
    yield _finding("sequence, pipeline and context parallelism", "missing", "planned for the releases 0.3, 0.4 and 0.5")
    yield from (_pack(row) for row in describe())


def _backend(available: bool, purpose: str) -> tuple[str, str]:
    return ("works", purpose) if available else ("missing", f"no {purpose}: this torch was built without the backend")


def _attention(devices: int) -> dict[str, str]:
    installed = _version("flash-attn") != "not installed"
    if installed and devices:
        return _finding("flash attention", "works", "attn_implementation='flash_attention_2'")
    reason = "needs a CUDA device" if installed else "flash-attn is not installed"
    return _finding("flash attention", "missing", f"{reason}; sdpa and eager attention work")


def _pack(row: dict[str, Any]) -> dict[str, str]:
    name = f"pack {row['name']} ({row['distribution']} {row['version']})"
    if row["error"]:
        return _finding(name, "fails", row["error"])
    if row["status"] == "blocked":
        return _finding(name, "missing", "blocked by SHARDCORE_PACKS or SHARDCORE_DISABLE_PACKS")
    outside = [t for t in row["tested"] if not t["inside"]]
    notes = [
        f"{t['library']} {t['installed'] or 'not installed'} is outside the tested range {t['range']}" for t in outside
    ]
    return _finding(name, "works", "; ".join([f"{len(row['classes'])} classes", *notes]))


def _finding(what: str, state: str, why: str) -> dict[str, str]:
    return {"what": what, "state": state, "why": why}


def show(findings: dict[str, Any]) -> None:
    """Print the findings as two tables."""
    show_table("versions", ("library", "version"), list(findings["versions"].items()))
    click.echo()
    show_table("checks", ("what", "state", "why"), [(f["what"], f["state"], f["why"]) for f in findings["checks"]])
