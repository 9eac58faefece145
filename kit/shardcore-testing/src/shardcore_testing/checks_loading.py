"""Checks of models that are never there as a whole: read from files, and initialised, part by part."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardcore
from shardcore_testing.checks_state import shared_folder
from shardcore_testing.findings import Ledger
from shardcore_testing.parity import whole
from shardcore_testing.subject import Subject, flat

_SEED = 5
#: Parameters of at least so many numbers have the spread of the native ones to within a quarter.
_MANY = 600


def loading(s: Subject, ledger: Ledger) -> None:
    """Files are read as the library of the model reads them, bit for bit, and only those that are of the checkpoint."""
    with ledger.check("loading"), shared_folder(s) as folder:
        reference = s.build()
        try:
            native, read = (_pretrained if hasattr(reference, "from_pretrained") else _plain)(
                s, reference, Path(folder)
            )
        except ValueError as error:  # a part of it cannot compute attention as the rest does, and is asked to
            ledger.closed(f"the unsharded model cannot be read: {error}")
            return
        _same(ledger, native, model := read())
        inputs = s.inputs(native)
        for (name, mine), (_, theirs) in zip(flat(native(**inputs)), flat(model(**inputs)), strict=True):
            ledger.close(name, mine, theirs)


def initialisation(s: Subject, ledger: Ledger) -> None:
    """A model that has no file is initialised as its library does it, with the same values on any mesh."""
    with ledger.check("initialisation"):
        _initialised(s, ledger, s.build())


def _pretrained(s: Subject, reference: Any, folder: Path) -> tuple[Any, Callable[[], Any]]:
    """Return the model that the native ``from_pretrained`` loads, and what loads the sharded one."""
    if s.rank == 0:
        reference.save_pretrained(folder, max_shard_size=30_000)
        _add_strangers(folder)
    s.gathered(None)
    # How attention and experts compute is no part of a checkpoint, and some ways cannot compute in float64.
    options = {"dtype": torch.float64, "attn_implementation": reference.config._attn_implementation}
    if experts := getattr(reference.config, "_experts_implementation", None):
        options["experts_implementation"] = experts
    native = type(reference).from_pretrained(folder, **options).to(s.device)
    fields = {"policy": s.policy(native), "tp": s.tp, **s.fields, **options}
    return native, functools.partial(shardcore.from_pretrained, type(reference), folder, **fields)


def _add_strangers(folder: Path) -> None:
    """Put files beside a checkpoint that are not of it: what an earlier one has left, and one in another precision."""
    file = min(folder.glob("*.safetensors"))
    others = {name: 3 * tensor for name, tensor in load_file(file).items()}
    for name in ("model-99998-of-99999.safetensors", "model.fp16.safetensors"):
        save_file(others, folder / name, metadata={"format": "pt"})


def _plain(s: Subject, reference: Any, folder: Path) -> tuple[Any, Callable[[], Any]]:
    """Return the model whose tensors are in a file, and what shards one that was built without values."""
    file = folder / "model.safetensors"
    if s.rank == 0:
        save_file({name: tensor.clone() for name, tensor in reference.state_dict().items()}, file)
    s.gathered(None)
    empty = shardcore.on_meta(s.build)
    given = {"policy": s.policy(empty), "weights": file, "tp": s.tp, **s.fields}
    return reference, functools.partial(shardcore.shard, empty, **given)


def _same(ledger: Ledger, native: nn.Module, model: nn.Module) -> None:
    """Names, and bits of every parameter and buffer."""
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        wanted, got = dict(kind(native, remove_duplicate=False)), dict(kind(model, remove_duplicate=False))
        ledger.true(wanted.keys() == got.keys(), f"the names differ in {sorted(wanted.keys() ^ got.keys())}")
        for name in [name for name in wanted if name in got]:  # in one order: gathering is collective
            ledger.true(_equal(wanted[name], got[name]), f"{name} differs from the native one")


def _equal(wanted: Tensor, got: Tensor) -> bool:
    got = whole(got.detach())
    return wanted.dtype == got.dtype and torch.equal(wanted.detach().to(got.device), got)


def _initialised(s: Subject, ledger: Ledger, reference: Any) -> None:
    """The values are those of one rank alone, and are spread as the native ones."""
    build = _builder(s, reference)
    sharded, alone = shardcore.on_meta(build), shardcore.on_meta(build)
    sharded = s.shard(sharded)
    shardcore.initialize(sharded, seed=_SEED)
    shardcore.initialize(alone, seed=_SEED)
    _same(ledger, alone, sharded)
    torch.manual_seed(_SEED)
    native = dict(build().named_parameters())
    for name, parameter in alone.named_parameters():
        wanted, got = native[name].detach().to(parameter.device), parameter.detach()
        if wanted.numel() >= _MANY:
            spread, right = float(got.std()), float(wanted.std())
            ledger.true(
                abs(spread - right) <= 0.25 * right, f"{name} is spread by {spread:.3g}, natively by {right:.3g}"
            )
        else:
            same = wanted.numel() > 1 and bool((wanted == wanted.flatten()[0]).all())
            ledger.true(
                not same or torch.equal(wanted, got), f"{name} is natively {float(wanted.flatten()[0]):g} throughout"
            )


def _builder(s: Subject, reference: Any) -> Callable[[], nn.Module]:
    """Return what builds the model as its library does; that of the case gives it other values."""
    if hasattr(reference, "from_pretrained"):
        return lambda: type(reference)(copy.deepcopy(reference.config)).to(torch.float64).train()
    return s.build
