"""Checks of state and outputs: state dicts, checkpoints, save_pretrained, captured outputs."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardcore_testing.findings import Ledger
from shardcore_testing.parity import gradient_errors, parameter_errors, whole
from shardcore_testing.subject import Subject, adamw, flat
from shardcore_testing.tiny_models import weighted_mean

#: What tells apart the captured outputs of several stacks, all of which one argument asks for.
_STACK = re.compile("^(encoder|decoder|cross)_")
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def other_weights(model: Any) -> Any:
    """Return a copy of ``model`` with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.7).add_(0.01)
    return other


def state(s: Subject, ledger: Ledger) -> None:
    """State dicts go out and come in, whole and in parts (H9, H10, H15)."""
    with ledger.check("state dict"):
        reference, model = s.twins()
        other = other_weights(reference)
        wanted = reference.state_dict()
        for name, tensor in model.state_dict().items():
            ledger.close(name, wanted[name], whole(tensor))
        full: dict[str, Any] = get_model_state_dict(model, options=_FULL)
        if s.rank == 0:
            ledger.true(
                full.keys() == wanted.keys(), f"the whole state differs in {sorted(full.keys() ^ wanted.keys())}"
            )
            for name in full.keys() & wanted.keys():
                ledger.close(f"whole {name}", wanted[name].cpu(), full[name])
        ledger.true(True, "")
        second = s.shard(copy.deepcopy(other))
        second.load_state_dict(model.state_dict())
        ledger.errors(_exact(parameter_errors(reference, second)))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=s.tp > 1)
        set_model_state_dict(second, other.state_dict() if s.rank == 0 else {}, options=options)
        ledger.errors(_exact(parameter_errors(other, second)))
        inputs = s.inputs(other)
        for (name, mine), (_, theirs) in zip(flat(other(**inputs)), flat(second(**inputs)), strict=True):
            ledger.close(f"after loading, {name}", mine, theirs)


def _exact(errors: dict[str, float]) -> dict[str, float]:
    return {name: error if error == 0 else float("inf") for name, error in errors.items()}


@contextmanager
def shared_folder(s: Subject) -> Iterator[str]:
    """Yield a folder that all ranks share and that goes away afterwards."""
    made = tempfile.TemporaryDirectory(prefix="shardcore-kit-") if s.rank == 0 else None
    try:
        yield str(s.gathered(made.name if made else "")[0])
        s.gathered(None)
    finally:
        if made:
            made.cleanup()


def checkpoint(s: Subject, ledger: Ledger) -> None:
    """A checkpoint of torch, saved in a training, goes on unsharded and sharded: the next step is the unsharded one."""
    with ledger.check("checkpoint"):
        _goes_on(s, ledger)


def _goes_on(s: Subject, ledger: Ledger) -> None:
    reference, model = s.twins()
    untrained = copy.deepcopy(reference)
    wanted, optimizer = adamw(reference), adamw(model)
    train_step(s, reference, wanted, 0)
    train_step(s, model, optimizer, 0)
    with shared_folder(s) as folder:
        states = get_state_dict(model, optimizer)
        save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
        loaded = {"unsharded": other_weights(untrained), f"tp {s.tp}": s.shard(other_weights(untrained))}
        for name, into in loaded.items():
            with ledger.place(f"continued {name}"):
                own = adamw(into)
                states = get_state_dict(into, own)
                read: dict[str, Any] = {"model": states[0], "optimizer": states[1]}
                # Parameters that no call uses, such as mask tokens, have no state to be read.
                load(read, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
                set_state_dict(into, own, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
                ledger.errors(parameter_errors(reference, into))
                loaded[name] = (into, own)
    train_step(s, reference, wanted, 1)
    for name, (into, own) in loaded.items():
        train_step(s, into, own, 1)
        with ledger.place(f"one step later, {name}"):
            ledger.errors(parameter_errors(reference, into))


def train_step(s: Subject, model: Any, optimizer: torch.optim.Optimizer, seed: int, like: Any = None) -> None:
    """Train ``model`` with the inputs of ``seed`` for ``like``, which FSDP2 has given no other class, if not itself."""
    s.loss(model(**s.inputs(model if like is None else like, seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def saving(s: Subject, ledger: Ledger) -> None:
    """``save_pretrained`` writes the files of the unsharded model, bit for bit (H10, H15)."""
    with ledger.check("save_pretrained"):
        if not s.case.supports.save_pretrained or not hasattr(s.build(), "save_pretrained"):
            ledger.closed("save_pretrained")
            return
        reference, model = s.twins()
        with shared_folder(s) as folder:
            save_beside(s, ledger, reference, model, Path(folder), max_shard_size=30_000)


def save_beside(s: Subject, ledger: Ledger, reference: Any, model: Any, folder: Path, **options: Any) -> None:
    """Save both models, and compare their files."""
    ours, theirs = folder / "ours", folder / "theirs"
    model.save_pretrained(ours, **options)
    if s.rank == 0:
        reference.save_pretrained(theirs, **options)
        _same_files(ledger, ours, theirs)
    ledger.true(True, "")


def _same_files(ledger: Ledger, ours: Path, theirs: Path) -> None:
    mine, wanted = (sorted(path.name for path in folder.iterdir()) for folder in (ours, theirs))
    ledger.true(mine == wanted, f"it wrote {mine}, and the unsharded model {wanted}")
    for name in sorted({*mine} & {*wanted}):
        if not name.endswith(".safetensors"):
            ledger.true((ours / name).read_text() == (theirs / name).read_text(), f"{name} differs")
            continue
        got, right = load_file(ours / name), load_file(theirs / name)
        ledger.true(got.keys() == right.keys(), f"{name} holds other tensors")
        for key in sorted(got.keys() & right.keys()):
            ledger.true(torch.equal(got[key], right[key]), f"{key} in {name} differs")


def captured(s: Subject, ledger: Ledger) -> None:
    """Outputs that are asked for are whole, right and differentiable (H17)."""
    with ledger.check("captured"):
        if not s.case.supports.captured:
            ledger.closed("captured outputs")
            return
        options = {}
        if "eager" in s.case.options.get("attn_implementation", ()):  # other attentions return no weights
            options["attn_implementation"] = "eager"
        reference, model = s.twins(**options)
        asked = {f"output_{_STACK.sub('', name)}": True for name in s.case.supports.captured}
        wanted, got = (m(**s.inputs(reference), **asked) for m in (reference, model))
        mine, theirs = (
            {name: t for name, t in flat(out) if name.split("[")[0] in _whole_names(s, out)} for out in (wanted, got)
        )
        for name in s.case.supports.captured:
            ledger.true(
                any(name in key for key in mine),
                f"the unsharded model captured no {name}: a case with attn_implementation='eager' has them, or correct "
                "Supports.captured",
            )
        ledger.true(mine.keys() == theirs.keys(), f"captured were {list(theirs)}")
        for name in mine.keys() & theirs.keys():
            ledger.close(name, mine[name], theirs[name])
        for named in filter(None, (mine, theirs)):
            weighted_mean(*named.values()).backward()
        ledger.errors(gradient_errors(reference, model))
        _tuples(s, ledger, reference, model, asked)


def _whole_names(s: Subject, out: Any) -> set[str]:
    """Return the names of an output's entries that belong to what the case captures."""
    return {key.split("[")[0] for key, _ in flat(out) if any(name in key for name in s.case.supports.captured)}


def _tuples(s: Subject, ledger: Ledger, reference: Any, model: Any, asked: dict[str, bool]) -> None:
    """Compare what is returned as a tuple, where the unsharded model can."""
    try:
        wanted = reference(**s.inputs(reference), **asked, return_dict=False)
    except TypeError:
        return
    if not isinstance(wanted, tuple):
        return
    got = model(**s.inputs(reference), **asked, return_dict=False)
    mine, theirs = list(flat(wanted)), list(flat(got))
    ledger.true([n for n, _ in mine] == [n for n, _ in theirs], "as a tuple, outputs have other places")
    for (name, tensor), (_, other) in zip(mine, theirs, strict=False):
        ledger.close(f"tuple {name}", tensor, other)
