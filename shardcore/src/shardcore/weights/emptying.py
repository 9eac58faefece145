"""Taking the recipes out of a model that was built of lazy tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardcore.weights.lazy import LazyTensor
from shardcore.weights.recipes import Constant, Recipe

__all__ = ["emptied"]


def emptied(model: nn.Module) -> dict[str, Recipe]:
    """Leave the parameters of ``model`` on the meta device, everything else real, and return the parameters' recipes.

    Buffers and other tensors that modules keep are small, and code may look at them at any time: they are made now. A
    parameter that has values already becomes a recipe too.

    Returns:
        The recipes by every name of the parameters.
    """
    recipes: dict[str, Recipe] = {}
    made = _Made()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                meta, recipe = made.parameter(parameter)
                if recipe is not None:
                    recipes[f"{path}.{name}" if path else name] = recipe
                module._parameters[name] = meta
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = made.real(buffer)
        for name, value in vars(module).items():
            if type(value) in _HOLDERS and name not in ("_parameters", "_buffers", "_modules"):
                module.__dict__[name] = made.real(value)
    return recipes


#: What a tensor without values may be found in, and such a tensor itself.
_HOLDERS = frozenset({LazyTensor, dict, list, tuple})


class _Made:
    """What became of each tensor, so that shared ones stay shared."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Any, Any]] = {}  # with the old one, so that no id is used twice
        self._parameters: dict[int, tuple[nn.Parameter, nn.Parameter, Recipe | None]] = {}

    def parameter(self, old: nn.Parameter) -> tuple[nn.Parameter, Recipe | None]:
        """Return the parameter on the meta device, and its recipe; None if it is there already."""
        if id(old) not in self._parameters:
            recipe: Recipe | None = None
            new = old
            if isinstance(old, LazyTensor):
                recipe = old.recipe
            elif not old.is_meta:
                recipe = Constant(tuple(old.shape), old.dtype, old.detach())
            if recipe is not None:
                like = torch.empty_like(old, device="meta") if not isinstance(old, LazyTensor) else _like(old)
                new = nn.Parameter(like, requires_grad=old.requires_grad)
                new.__dict__.update({name: value for name, value in old.__dict__.items() if name != "_is_param"})
            self._parameters[id(old)] = old, new, recipe
            self._parameters[id(new)] = new, new, recipe
        _, new, recipe = self._parameters[id(old)]
        return new, recipe

    def real(self, value: Any) -> Any:
        """Return ``value`` with every lazy tensor in it made."""
        if isinstance(value, LazyTensor):
            if id(value) in self._parameters:
                return self._parameters[id(value)][1]
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, value.evaluate()
            return self._tensors[id(value)][1]
        if type(value) in (list, tuple):
            new = [self.real(item) for item in value]
            return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
        if type(value) is dict:
            for key, item in value.items():
                value[key] = self.real(item)
        return value


def _like(lazy: LazyTensor) -> Tensor:
    return torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
