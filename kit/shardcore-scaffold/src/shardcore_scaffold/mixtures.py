"""Mixtures of experts in the blocks of a model: which of its modules route, score and hold the experts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardcore_scaffold.draft import called, names_in
from shardcore_scaffold.facts import Facts

_WEIGHTS = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
_STACKED, _BIASES = 3, 2  # dims of the weights and of the biases of all experts


@dataclass(frozen=True)
class Mixture:
    """A module that routes tokens to experts; names are paths in the model.

    Attributes:
        path: the module that routes.
        weights: the module that holds the experts.
        router: the module that scores them.
        shared_col: column linears of experts that every token visits.
        shared_row: the linear that follows them; empty if there are none.
        rest: other modules and parameters in it.
    """

    path: str
    weights: str
    router: str
    shared_col: tuple[str, ...] = ()
    shared_row: str = ""
    rest: tuple[str, ...] = ()

    def rules(self, place: str, captured: int | None) -> list[tuple[str, str]]:
        """Return its rules for the block at ``place``, with the place of the logits that a balancing loss needs."""
        inner, outer = len(self.path) + 1, len(place) + 1
        text = called(
            "experts",
            block=f'"{self.path[outer:]}"',
            weights=f'"{self.weights[inner:]}"',
            router=f'"{self.router[inner:]}"',
            captured="" if captured is None else str(captured),
            shared_col=names_in([f'"{name[inner:]}"' for name in self.shared_col]),
            shared_row=f'"{self.shared_row[inner:]}"' if self.shared_row else "",
        )
        partial = ", ".join(f'"{name[outer:]}"' for name in self.rest)
        return [("experts", text), *([("partial", f"partial({partial}),")] if partial else [])]


@functools.lru_cache(maxsize=1)  # every draft of a model asks
def mixtures_of(facts: Facts) -> tuple[Mixture, ...]:
    """Return the mixtures of a model whose experts lie in one module, and which return what their experts add up."""
    found = list(_found(facts))
    return tuple(mixture for mixture, adds in zip(found, _add_up(facts, found), strict=True) if adds)


def _add_up(facts: Facts, mixtures: Sequence[Mixture]) -> list[bool]:
    """Tell of each mixture whether twice what its experts return is twice what it returns.

    Ranks add up what a mixture makes of their parts: a norm or a bias after the experts would act on each part.
    """
    model = copy.deepcopy(facts.fresh)
    calls: dict[str, tuple[Any, Any]] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: calls.setdefault(path, (args, kwargs)) and None

    def twice(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return 2 * out

    hooks = [model.get_submodule(m.path).register_forward_pre_hook(keep(m.path), with_kwargs=True) for m in mixtures]
    with torch.no_grad():
        facts.call(model)
        for hook in hooks:
            hook.remove()
        found = []
        for mixture in mixtures:
            args, kwargs = calls.get(mixture.path, ((), {}))
            block = model.get_submodule(mixture.path)
            once = _first(block(*args, **kwargs)) if mixture.path in calls else None
            for name in filter(None, (mixture.weights, mixture.shared_row)):
                model.get_submodule(name).register_forward_hook(twice)
            found.append(once is not None and torch.allclose(_first(block(*args, **kwargs)), 2 * once))
    return found


def _first(out: Any) -> Tensor:
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


def _found(facts: Facts) -> Iterator[Mixture]:
    for path, module in facts.modules.items():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        above = path.rpartition(".")[0]
        if not _are_experts(own) or facts.owner(path) is None or facts.inside(path):
            continue
        count = own["down_proj"].shape[0]
        routers = [
            name
            for name, child in facts.modules[above].named_children()
            if child is not module and _scores(child, count)
        ]
        if len(routers) != 1 or above == facts.owner(path):
            continue
        router = f"{above}.{routers[0]}"
        shared = [region for region in facts.regions if region.row.startswith(f"{above}.") and region.width == 1]
        if len(shared) > 1:
            continue
        col = tuple(column.name for region in shared for column in region.columns)
        row = shared[0].row if shared else ""
        known = (path, router, *col, *([row] if row else []))
        names = [
            name
            for name, _ in facts.model.named_parameters()
            if name.startswith(f"{above}.") and not any(name.startswith(f"{other}.") for other in known)
        ]
        yield Mixture(above, path, router, col, row, tuple(facts.as_modules(names)))


def _are_experts(own: Mapping[str, nn.Parameter]) -> bool:
    """Tell whether parameters of a module are the weights of experts, with biases or without."""
    biases = {name for name in own if name.endswith("_bias")}
    named = own.keys() - biases in _WEIGHTS and {name.removesuffix("_bias") for name in biases} <= own.keys()
    return named and all(p.ndim == (_BIASES if name in biases else _STACKED) for name, p in own.items())


def _scores(module: nn.Module, experts: int) -> bool:
    """Tell whether a module has a score for each expert."""
    return any(p.ndim == 2 and p.shape[0] == experts for p in module.parameters())  # a matrix
