"""Which numbers of a model depend on which: found out by running it, and asking autograd.

Between its linears a model computes what it likes: heads, gates, norms, rotations. Whether a pair of linears can be
split over ranks depends on nothing but this: do the features that the second one reads fall into groups, each of which
is made of its own features of the first one, and of nothing else? So every linear's output is made a leaf here, and the
gradient of each input feature of each linear is looked at: it is zero where there is no dependence.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from shardcore.nn.linear.alike import Product, product_of

_AT_ONCE = 1 << 20  # entries of the largest tensor, for all features that autograd is asked about


@dataclass(eq=False)
class Linear:
    """A module that multiplies, and what went in and came out in each of its calls.

    Attributes:
        name: its path in the model.
        product: its sizes.
        inputs: what it was given in each call.
        outputs: leaves that stand for what it returned.
    """

    name: str
    product: Product
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """What the input of a linear is made of, with no other linear in between.

    Attributes:
        name: of a linear.
        pattern: (input features, output features), True where one depends on the other.
    """

    name: str
    pattern: Tensor


@dataclass(eq=False)
class Dependence:
    """What was found.

    Attributes:
        linears: every module that multiplies and was called, by path, in the order of their first calls.
        reads: linear -> the names of linears and of parameters that its input is made of.
        returned: the linears and parameters that the outputs of the model are made of, with no linear in between.
        arguments: module -> argument -> the tensor of fractions that it was, in each call.
        first: module -> the name of its first argument.
        residual: modules whose output is made of their own first argument with no linear in between.
    """

    linears: dict[str, Linear]
    reads: dict[str, set[str]]
    returned: set[str]
    arguments: dict[str, dict[str, list[Tensor]]]
    first: dict[str, str]
    residual: set[str]
    _parameters: dict[str, nn.Parameter]

    def readers(self, name: str) -> set[str]:
        """Return the linears whose input is made of a linear or parameter, and ``""`` if the outputs are."""
        found = {linear for linear, sources in self.reads.items() if name in sources}
        return found | ({""} if name in self.returned else set())

    def sources(self, row: str, names: Collection[str]) -> list[Source]:
        """Return of which output features of the linears ``names`` the input features of the linear ``row`` are made.

        Features that follow each other are one where the first of them is made of all that they are made of: none of
        them can be split from the others. Empty if the first feature is made of all features of all these linears.
        """
        every = torch.eye(self.linears[row].product.in_features)
        outputs = [(name, leaf) for name in names for leaf in self.linears[name].outputs]
        first = self._asked(row, outputs, every[:1]).values()
        if all(pattern.all() for pattern in first):
            return []
        many = max((pattern.numel() // int(pattern.sum()) for pattern in first if pattern.any()), default=1)
        runs = every[:, None] if len(every) % many else every.reshape(many, len(every) // many, -1)
        found = self._asked(row, outputs, runs.sum(1))
        firsts = self._asked(row, outputs, runs[:, 0]) if runs.shape[1] > 1 else {}
        if any(not torch.equal(found[key], pattern) for key, pattern in firsts.items()):
            found = self._asked(row, outputs, every)
        return [Source(name, p.repeat_interleave(len(every) // len(p), 0)) for (name, _), p in found.items()]

    def parameters(self, row: str, labels: Tensor, names: Collection[str]) -> dict[tuple[str, int], Tensor]:
        """Return, for each dim of parameters, which units that ``row`` reads depend on its entries, as `patterns`."""
        leaves = [(name, self._parameters[name]) for name in names]
        found = self._asked(row, leaves, functional.one_hot(labels).T.float())
        return {(name, dim + self._parameters[name].ndim): own[labels] for (name, dim), own in found.items()}

    def patterns(self, row: str, labels: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each dim of some tensors of equal shape, which units that ``row`` reads depend on its entries.

        As `Source.pattern`, the same for all features of a unit; ``labels`` are the units of the features.
        """
        found = self._asked(row, [("", tensor) for tensor in tensors], functional.one_hot(labels).T.float())
        return [pattern[labels] for pattern in found.values()]

    def _asked(self, row: str, leaves: Sequence[tuple[str, Tensor]], groups: Tensor) -> dict[tuple[str, int], Tensor]:
        """Return the patterns of the dims of leaves, of outputs the last, with a row for each group of features."""
        found = {
            (name, dim): torch.zeros(len(groups), leaf.shape[dim], dtype=torch.bool)
            for name, leaf in leaves
            for dim in range(-1 if name in self.linears else -leaf.ndim, 0)
        }
        for given in (given for given in self.linears[row].inputs if leaves and given.requires_grad):
            for some, touched in _touched(given, groups, [leaf for _, leaf in leaves]):
                for (name, dim), pattern in found.items():
                    for own in (
                        own for (of, _), own in zip(leaves, touched, strict=True) if of == name and own is not None
                    ):
                        pattern[some] |= own.movedim(dim, 1).flatten(2).any(2) if own.ndim > 2 else own
        return found


def _touched(
    given: Tensor, groups: Tensor, leaves: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Sequence[Tensor | None]]]:
    """Yield which entries of ``leaves`` some groups of the features of a tensor depend on: (some, ...), or None.

    ``groups`` are rows with a one for each feature that is in a group.
    """
    flat = given.reshape(-1, groups.shape[1])
    features = (torch.rand(flat.shape[0], dtype=flat.dtype) + 0.5) @ flat
    ask = functools.partial(torch.autograd.grad, features, leaves, retain_graph=True, allow_unused=True)
    weights = torch.rand(flat.shape[1], dtype=flat.dtype) + 0.5  # what features have in common does not cancel
    batched, grads = True, list[Tensor | None]()
    for some in torch.arange(len(groups)).split(max(_AT_ONCE // max([given.numel(), *map(torch.numel, leaves)]), 1)):
        rows = groups[some] * weights
        if batched:
            try:
                grads = list(ask(grad_outputs=rows, is_grads_batched=True))
            except RuntimeError:  # a function that cannot do several at once
                batched = False
        if not batched:
            each = [ask(grad_outputs=row) for row in rows]
            grads = [None if own[0] is None else torch.stack(own) for own in zip(*each, strict=True)]
        yield some, [None if grad is None else grad != 0 for grad in grads]


def dependence_of(model: nn.Module, call: Callable[[nn.Module], Any], *, passing: Collection[str] = ()) -> Dependence:
    """Run ``model`` once and return what depends on what in it.

    Args:
        model: small, on the CPU, with random parameters; best in float64, without dropout.
        call: calls it and returns what it returns.
        passing: modules that let every feature pass by itself, for this once.
    """
    paths = dict(model.named_modules())
    linears = {
        name: Linear(name, product)
        for name, module in paths.items()
        if name and isinstance(product := product_of(module), Product)
    }
    arguments: dict[str, dict[str, list[Tensor]]] = defaultdict(dict)
    first: dict[str, str] = {}
    returned: dict[str, list[Tensor]] = defaultdict(list)
    order: dict[str, None] = {}
    parameters = {
        name: p for name, p in model.named_parameters() if name.rpartition(".")[0] not in linears or p.ndim == 0
    }
    with ExitStack() as stack:
        for name, module in paths.items():
            if name in linears:
                hook = module.register_forward_hook(_cut(linears[name], order))
            else:
                signature = inspect.signature(module.forward)
                first[name] = next(iter(signature.parameters), "")
                arrive = module.register_forward_pre_hook(_arrive(signature, arguments[name]), with_kwargs=True)
                stack.callback(arrive.remove)
                hook = module.register_forward_hook(_pass if name in passing else _leave(returned[name]))
            stack.callback(hook.remove)
        with _Awake():
            out = call(model)
    called = {name: linears[name] for name in order}
    leaves = [(name, leaf) for name, linear in called.items() for leaf in linear.outputs]
    leaves += [(name, p) for name, p in parameters.items() if p.requires_grad]
    reads = {name: made_of(linear.inputs, leaves) for name, linear in called.items()}
    residual = {
        name for name, given in arguments.items() if (own := given.get(first[name])) and _reaches(returned[name], own)
    }
    return Dependence(called, reads, made_of(list(_tensors(out)), leaves), dict(arguments), first, residual, parameters)


def _cut(linear: Linear, order: dict[str, None]) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        order[linear.name] = None
        leaf = out.detach().requires_grad_()
        linear.inputs.append(args[0])
        linear.outputs.append(leaf)
        return leaf.clone()  # which may be changed in place, as a leaf may not

    return hook


def _arrive(signature: inspect.Signature, arguments: dict[str, list[Tensor]]) -> Callable[..., Any]:
    """Note the arguments, and put something in their places of which it is known whether it was used."""

    def marked(name: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        mark = value if value.requires_grad else value.detach().requires_grad_()
        arguments.setdefault(name, []).append(mark.view_as(mark))
        return arguments[name][-1]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = itertools.chain(signature.parameters, itertools.repeat(""))
        placed = tuple(marked(name, value) for name, value in zip(names, args, strict=False))
        return placed, {name: marked(name, value) for name, value in kwargs.items()}

    return hook


def _pass(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    return args[0] * 1.0


def _leave(returned: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        returned.extend(_tensors(out))

    return hook


class _Awake(TorchFunctionMode):
    """Lets every feature pass, also where a function is flat, or rounded to be so: what depends on what is the same."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SLEEPY:
            return functional.softplus(args[0].asinh())
        return func(*((args[0].asinh(), *args[1:]) if func in _FLAT and args else args), **(kwargs or {}))


_SLEEPY = frozenset(
    {functional.relu, functional.relu_, functional.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
)
_FLAT = frozenset(
    {functional.softmax, torch.softmax, Tensor.softmax, functional.gelu, functional.silu, functional.sigmoid, torch.exp}
    | {torch.sigmoid, Tensor.sigmoid, functional.tanh, torch.tanh, Tensor.tanh, functional.softplus, Tensor.exp}
)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def made_of(tensors: Sequence[Tensor], leaves: Sequence[tuple[str, Tensor]]) -> set[str]:
    """Return the names of the leaves that some of the tensors are made of."""
    ends = [tensor for tensor in tensors if tensor.requires_grad]
    if not ends:
        return set()
    grads = torch.autograd.grad(
        [(tensor * (torch.rand_like(tensor) + 0.5)).sum() for tensor in ends],
        [leaf for _, leaf in leaves],
        retain_graph=True,
        allow_unused=True,
    )
    return {name for (name, _), grad in zip(leaves, grads, strict=True) if grad is not None and bool((grad != 0).any())}


def _reaches(ends: Sequence[Tensor], starts: Sequence[Tensor]) -> bool:
    found = made_of(ends, [(str(number), start) for number, start in enumerate(starts)])
    return bool(found)
