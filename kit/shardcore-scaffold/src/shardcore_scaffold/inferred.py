"""The policy of a class that no pack serves, inferred from what a small model of the class computes."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardcore.errors import ConfigError, ShardcoreWarning
from shardcore.inferred import Inference
from shardcore.mesh.axes import time_limit
from shardcore.policy import Policy
from shardcore_scaffold import kept

# What says that a process is a rank of a job: names, and how names begin.
_OF_A_JOB = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
)
_OF_A_JOB_STEMS = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_")

_PROGRAM = "shardcore_scaffold.infer"
_LIMIT = 600.0  # seconds
_SHARE = 0.8  # of the time that the other ranks wait, so that they hear of it
#: Of a model's parameters: to split less is worth a warning, and much less is nothing that was asked for.
_MUCH, _LITTLE = 0.8, 0.5


def inferred(model: nn.Module, how: Inference, group: ProcessGroup | None) -> type[Policy]:
    """Return a policy for the class of ``model``; the first rank of ``group`` infers it for all.

    Raises:
        ConfigError: on all ranks: the class has no configuration, no policy fits, or the proof failed.
    """
    together = dist.is_initialized() and dist.get_world_size(group) > 1
    found: list[Any] = [None]
    if not together or dist.get_rank(group) == 0:
        found = [_asked(model, how, _limit(group) if together else _LIMIT)]
    if together:
        dist.broadcast_object_list(found, group=group, group_src=0)
    told = found[0]
    if "error" in told:
        raise ConfigError(told["error"] + _of_a_part(model))
    name = type(model).__name__
    if how == "proved" and told["split"] < _LITTLE:
        raise ConfigError(f"{_little(name, told)}; or take it as it is: infer='proved_in_part'")
    if not together or dist.get_rank(group) == 0:
        _say(name, told)
    return policy_from(name, told["source"])


def _limit(group: ProcessGroup | None) -> float:
    """Return the seconds that the first rank has: the others wait for its answer."""
    waits = time_limit(group)
    return _LIMIT if waits is None else min(_LIMIT, _SHARE * waits.total_seconds())


def _asked(model: nn.Module, how: Inference, limit: float) -> Mapping[str, Any]:
    """Return what the process says, or an ``error``: nothing is raised on one rank alone."""
    cls, config = type(model), getattr(model, "config", None)
    if how not in get_args(Inference):
        return {"error": f"infer= must be one of {', '.join(map(repr, get_args(Inference)))}; got {how!r}"}
    if getattr(cls, "config_class", None) is None or config is None or "." in cls.__qualname__:
        return {
            "error": f"policy='infer' builds a small copy from a model's configuration, and {cls.__name__} has none. "
            "Draft a policy from an example: shardcore new-pack NAME --example module:function"
        }
    if cls.__module__ == "__main__":
        return {
            "error": f"policy='infer' builds a small copy in a process of its own, which cannot import {cls.__name__}: "
            "the script that runs (__main__) defines it. Put it into a module, and import it from there"
        }
    try:
        return _answer(model, config.to_json_string(use_diff=False), limit, proved=how != "drafted")
    except subprocess.TimeoutExpired:
        why = f"it took more than {limit:.0f} s; draft it once with the command, and pass the policy"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return {"error": f"no policy for {cls.__name__} could be inferred: {why}. See: shardcore new-pack --help"}


def _of_a_part(model: nn.Module) -> str:
    """Return what to do where the language model alone, in one with images or sound, can be sharded; else nothing."""
    text = getattr(getattr(model, "config", None), "text_config", None)
    inside = ((path, module) for path, module in model.named_modules() if path)
    path = next((path for path, module in inside if text and getattr(module, "config", None) is text), None)
    if path is None or _tied(model, model.get_submodule(path)):  # which `shard` refuses, since it would come apart
        return ""
    return (
        f". Of a model with images or sound, shard the language model, in place: shardcore.shard(model.{path}, ...) "
        f"with the same arguments, and go on with the {type(model).__name__}"
    )


def _tied(model: nn.Module, part: nn.Module) -> bool:
    """Tell whether modules of ``model`` outside of ``part`` hold parameters of it."""
    others = set(model.modules()).difference(part.modules())
    held = {id(p) for other in others for p in other.parameters(recurse=False)}
    return not held.isdisjoint(map(id, part.parameters()))


def _answer(model: nn.Module, config: str, limit: float, *, proved: bool) -> Mapping[str, Any]:
    """Return what is kept of an earlier run, or else what the process says."""
    file = kept.place(model, config, proved=proved)
    if file is not None and (found := kept.read(file)) is not None:
        return {**found, "file": str(file)}
    asked = {"module": type(model).__module__, "name": type(model).__name__, "config": config, "proved": proved}
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM],
        input=json.dumps(asked),
        env=_of_a_child(sys.path),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.split())[-500:])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if file is not None and "error" not in told:
        kept.write(file, told)
    return told


def _of_a_child(path: Iterable[str]) -> dict[str, str]:
    """Return the environment for a Python process of its own: no rank of a job, with ``path`` to import from."""
    handed = {k: v for k, v in os.environ.items() if k not in _OF_A_JOB and not k.startswith(_OF_A_JOB_STEMS)}
    return {**handed, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _say(name: str, told: Mapping[str, Any]) -> None:
    proof = f"proved: {told['proof']}" if told["proof"] else "not proved"
    left = "".join(f"\n  - {doubt}" for doubt in dict.fromkeys(told["doubts"]))
    share = _percent(told["split"])
    before = f" in an earlier run, which kept it in {told['file']}" if "file" in told else ""
    logging.getLogger("shardcore").warning(
        "no pack was asked for %s: its policy was inferred from a small copy of the class%s, and splits %s of this "
        "model's parameters; each rank holds the others whole (%s)%s\nTo keep it: shardcore new-pack NAME --model %s",
        *(name, before, share, proof, left, name),
    )
    if told["split"] < _MUCH:
        # Where `shardcore.shard` was called.
        warnings.warn(_little(name, told), ShardcoreWarning, stacklevel=4)


def _little(name: str, told: Mapping[str, Any]) -> str:
    """Return that little is split, which parts are not, with their shares, and what can be done."""
    parts = ", ".join(f"{module}: {_percent(share)}" for module, share in told["whole"].items())
    return (
        f"the policy that was inferred for {name} splits only {_percent(told['split'])} of its parameters: each "
        f"tensor-parallel rank holds the others whole ({parts}). Write a policy from the draft "
        f"(shardcore new-pack NAME --model {name}), or divide what is whole over replicas: dp="
    )


def _percent(share: float) -> str:
    return f"{math.floor(100 * share)}%"


def policy_from(name: str, text: str) -> type[Policy]:
    """Return the policy that the source of a draft defines."""
    names: dict[str, Any] = {"__name__": "shardcore_inferred_policy"}
    exec(compile(text, f"<policy inferred for {name}>", "exec"), names)
    found: type[Policy] = names[f"{name}Policy"]
    return found
