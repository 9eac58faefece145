"""What a module does between its linears: whether a rank that has a part of their features can compute its part."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardcore.nn.linear.alike import Product


@dataclass(frozen=True, slots=True)
class LinearAt:
    """A linear of a region: its path, its sizes, and the entry of a policy that names it."""

    path: str
    sizes: Product
    said: str


def mixed(block: nn.Module, columns: Sequence[LinearAt], last: LinearAt, ranks: int) -> str | None:
    """Say why a rank cannot compute its part of what is between the linears of a block, or return None.

    The block is run with random numbers in the place of what its column linears return: with all of them, and with the
    first and with the last rank's. A rank has to get its part of what the row linear is given, and all that the block
    returns besides.
    """
    width, kind = last.sizes.in_features, type(block).__name__
    if not columns or any(column.sizes.out_features != width for column in columns):
        return f"not all linears before it return the {width} features that {last.path} reads"
    *starts, end = (linear.path.rpartition(".")[2] for linear in (*columns, last))
    others = {name: child for name, child in block._modules.items() if name not in (*starts, end)}
    own = [name for name, _ in block.named_parameters() if name.partition(".")[0] not in (*starts, end)]
    if own or "forward" in vars(block):
        return f"{kind} has {', '.join(own) or 'a forward'} of its own besides its linears"
    draw = functools.partial(torch.randn, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(0))
    x, features = draw(2, 3, columns[0].sizes.in_features), {name: draw(6, width) for name in starts}

    def run(part: slice) -> tuple[Tensor, list[Any]]:
        trial = object.__new__(type(block))
        places = {name: _Given(values[:, part]) for name, values in features.items()}
        places[end] = _Given(x.new_zeros(6, last.sizes.out_features))
        trial.__dict__.update(vars(block), _modules={**block._modules, **copy.deepcopy(others), **places})
        returned = tree_leaves(type(block).forward(trial.eval(), x))
        (found,) = places[end].inputs
        return found, [leaf for leaf in returned if isinstance(leaf, Tensor)]

    try:
        with torch.no_grad():
            (whole, out), step = run(slice(None)), -(-width // ranks)
            parts = slice(step), slice(min((ranks - 1) * step, width), None)
            found = [(whole[..., part], *run(part)) for part in parts]
            alike = [torch.allclose(part, own) and all(map(torch.allclose, out, others)) for part, own, others in found]
    except Exception as error:  # whatever the forward of a user's class raises for one tensor
        return f"the forward of {kind} cannot be tried with one tensor ({type(error).__name__}: {error})"
    return None if all(alike) else f"what {last.path} reads depends on features of other ranks, or on their number"


def read_by(module: nn.Module) -> set[str]:
    """Return the names that the code of a module's class mentions."""
    kinds = [vars(kind) for kind in type(module).__mro__ if kind.__module__ != nn.Module.__module__]
    values = [inspect.unwrap(v) for own in kinds for name, v in own.items() if name != "__init__" and callable(v)]
    codes = [value.__code__ for value in values if inspect.isfunction(value)]
    for code in codes:  # grows while it is gone through
        codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
    return {name for code in codes for name in code.co_names}


class _Given(nn.Module):
    """In the place of a linear: returns features (tokens, n) as they are given, and keeps its input."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.inputs = features, None, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.weight[: x[..., 0].numel()].reshape(*x.shape[:-1], -1)
