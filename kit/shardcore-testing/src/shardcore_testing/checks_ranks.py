"""Checks that ranks which do not hold the same are refused before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardcore.errors import ShardcoreError
from shardcore_testing.findings import Ledger
from shardcore_testing.subject import Subject


def ranks_differ(s: Subject, ledger: Ledger) -> None:
    """Models that differ on one rank, in what no parameter shows, are refused on every rank and left as they were."""
    with ledger.check("ranks differ"):
        built = s.build(**({"dropout": 0.1} if s.case.supports.dropout else {}))
        for what, change in _differences(built):
            with ledger.place(what):
                model = copy.deepcopy(built)
                if s.rank == s.tp - 1:
                    change(model)
                before = [type(module) for module in model.modules()]
                try:
                    s.shard(model)
                except ShardcoreError:
                    same = [type(module) for module in model.modules()] == before
                    ledger.true(same, "it was refused, but modules changed their class")
                else:
                    ledger.failed("ranks whose models differ in it were accepted, and train a mixture")


def _differences(model: nn.Module) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield one difference of each kind that ``model`` has: a norm's eps, a dropout, an activation, a mode below it."""
    found: dict[str, tuple[str, str, Any]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and "eps" in name:
                found.setdefault("eps", (path, name, value * 8 + 0.5))
        if isinstance(module, nn.Dropout) and module.p:
            found.setdefault("dropout", (path, "p", module.p + 0.25))
        if path and "dropout" not in type(module).__name__.lower():
            found["mode"] = (path, "training", not module.training)
        name, _, last = path.rpartition(".")
        if last.startswith("act") and not list(module.parameters()):
            found.setdefault("activation", (name, last, nn.ReLU() if isinstance(module, nn.Tanh) else nn.Tanh()))
    for path, name, value in found.values():

        def change(changed: nn.Module, path: str = path, name: str = name, value: Any = value) -> None:
            setattr(changed.get_submodule(path), name, value)

        yield f"{path}.{name}", change
    config = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if isinstance(value, float) and ("eps" in name or "dropout" in name):

            def reconfigure(changed: Any, name: str = name, value: float = value) -> None:
                setattr(changed.config, name, value + 0.5)

            yield f"config.{name}", reconfigure
            break
    if not found and config is None:
        yield "the mode of the model", lambda changed: changed.eval()
