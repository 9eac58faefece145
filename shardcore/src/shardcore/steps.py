"""The steps of a plan: what is done to a model, as data.

Each step names a module by its full name and says what becomes of it; `shardcore.changes` knows how to carry each kind
out. To add a kind, add a class here and a ``prepare`` for it there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardcore.nn import ParallelModule, SwappedModule

__all__ = [
    "CallByMethods",
    "Compile",
    "EnterArgument",
    "FreezeForInference",
    "FuseNorm",
    "GatherOutputs",
    "OpenRegion",
    "Recompute",
    "ReplaceMethods",
    "ReplaceModule",
    "ReplaceParameters",
    "SetAttribute",
    "SplitLogits",
    "SplitTokens",
    "Step",
    "Swap",
    "TakeLoss",
    "above",
    "to_data",
]


def above(path: str) -> Iterator[str]:
    """Yield the paths of the modules that hold the module ``path``, from the nearest to the model (``""``)."""
    while path:
        path = path.rpartition(".")[0]
        yield path


#: Keyword arguments as a hashable value.
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(ABC):
    """One thing done to the module ``path`` (its full name in the model)."""

    #: Whether the step splits something over ranks, so that one rank alone has no use for it.
    splits: ClassVar[bool] = True

    path: str

    def describe(self) -> str:
        """Return the step in a few words, without its path."""
        values = (f"{f.name}={to_data(getattr(self, f.name))!r}" for f in dataclasses.fields(self) if f.name != "path")
        return f"{type(self).__name__}({', '.join(values)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap(Step):
    """The module's class is swapped for a parallel one."""

    target: type[SwappedModule]
    options: Options = ()

    def describe(self) -> str:
        """See `Step.describe`."""
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.target.__name__}({options})" if options else self.target.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRegion(Step):
    """Activations enter a region where the module ``path`` is called.

    Attributes:
        argument: name and position of the entering argument.
        members: the column linears that share the enter.
        row: the row linear that ends the region; None if the region ends in its only member.
        block: the module that the region was declared for.
        also: names and positions of arguments that an `EnterArgument` has let in.
        after: modules and bare parameters below ``path`` that act on what the row linear returns.
    """

    argument: tuple[str, int]
    members: tuple[str, ...]
    row: str | None
    block: str
    also: tuple[tuple[str, int], ...] = ()
    after: tuple[str, ...] = ()

    def describe(self) -> str:
        """See `Step.describe`."""
        end = f", leaves at {self.short(self.row)}" if self.row else ""
        end += f" before {', '.join(map(self.short, self.after))}" if self.after else ""
        also = f" beside {', '.join(repr(name) for name, _ in self.also)}" if self.also else ""
        return f"enters with {self.argument[0]!r}{also} for {', '.join(map(self.short, self.members))}{end}"

    def short(self, name: str) -> str:
        """Return a full name relative to the block."""
        return name.removeprefix(f"{self.block}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterArgument(Step):
    """A further tensor enters the regions below the module ``path``, once for all of them.

    Attributes:
        argument: name and position of the entering argument.
    """

    argument: tuple[str, int]

    def describe(self) -> str:
        """See `Step.describe`."""
        return f"lets {self.argument[0]!r} into the regions below"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLoss(Step):
    """The loss is computed from what the module's forward returns, not inside it.

    Attributes:
        function: called with the model, the outputs ``logits`` and the arguments ``labels``.
        labels: the arguments that are taken out.
        logits: the outputs that the function takes.
    """

    function: Callable[..., Any]
    labels: tuple[str, ...]
    logits: tuple[str, ...]

    def describe(self) -> str:
        """See `Step.describe`."""
        return f"loss of {', '.join(self.logits)} against {', '.join(self.labels)} after the forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLogits(Step):
    """In calls of the module with labels, logits stay split over the vocabulary.

    Attributes:
        labels: name and position of the argument with labels.
        heads: the heads, by their full names.
        chunk: the number of tokens whose logits are computed at a time, within the loss; None keeps all of them.
    """

    labels: tuple[str, int]
    heads: tuple[str, ...]
    chunk: int | None = None

    def describe(self) -> str:
        """See `Step.describe`."""
        how = "stay split" if self.chunk is None else f"are computed within the loss, {self.chunk} tokens at a time,"
        return f"logits of {', '.join(self.heads)} {how} where {self.labels[0]!r} are given"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttribute(Step):
    """An attribute gets the value for one rank."""

    name: str
    value: Any

    def describe(self) -> str:
        """See `Step.describe`."""
        return f"{self.name} = {self.value!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOutputs(Step):
    """Captured outputs of the module are made whole.

    Attributes:
        dims: by output name, the dim that is split over the ranks in each captured tensor, and its full size.
        by_tokens: outputs that are split along the sequence where sequence parallelism is on.
        places: outputs that have their place in a tuple (``return_dict=False``) also when they are None.
    """

    dims: tuple[tuple[str, int, int], ...]
    by_tokens: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def describe(self) -> str:
        """See `Step.describe`."""
        gathered = [f"{name} on dim {dim} to {size}" for name, dim, size in self.dims]
        return "gathers " + ", ".join([*gathered, *(f"{name} along the sequence" for name in self.by_tokens)])


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTokens(Step):
    """Activations between the blocks of the module ``path`` are split along the sequence.

    Attributes:
        blocks: its blocks; the first one that is called splits them.
        argument: name and position of the argument of a block that holds them.
        end: the module after which they are whole again.
    """

    blocks: tuple[str, ...]
    argument: tuple[str, int]
    end: str

    @property
    def places(self) -> frozenset[str]:
        """The modules that work on split tokens, with all that is below them."""
        return frozenset((*self.blocks, self.end))

    def covers(self, path: str) -> bool:
        """Tell whether the module ``path`` works on split tokens, or inside regions between them."""
        return not self.places.isdisjoint((path, *above(path)))

    def describe(self) -> str:
        """See `Step.describe`."""
        return f"tokens of {self.argument[0]!r} split from {self.blocks[0]} to {self.end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceMethods(Step):
    """Methods of this instance are replaced by a user's functions."""

    methods: tuple[tuple[str, Callable[..., Any]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceParameters(Step):
    """A user's function replaces parameters of the module in place."""

    function: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceModule(Step):
    """The module is replaced by what a user's `ParallelModule` makes of it."""

    target: type[ParallelModule]
    options: Options = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseNorm(Step):
    """A root-mean-square norm computes with `torch.nn.functional.rms_norm`.

    Attributes:
        eps: the attribute of the module that holds the constant below the root.
    """

    splits: ClassVar[bool] = False
    eps: str

    def describe(self) -> str:
        """See `Step.describe`."""
        return "torch's fused rms_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Step):
    """The module's forward is compiled while training."""

    splits: ClassVar[bool] = False

    def describe(self) -> str:
        """See `Step.describe`."""
        return "compiled while training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Step):
    """The module's activations are recomputed in the backward."""

    splits: ClassVar[bool] = False

    def describe(self) -> str:
        """See `Step.describe`."""
        return "recomputed in the backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallByMethods(Step):
    """The module is run by methods besides its forward.

    Attributes:
        methods: their names.
    """

    splits: ClassVar[bool] = False

    methods: tuple[str, ...]

    def describe(self) -> str:
        """See `Step.describe`."""
        return f"is run by {', '.join(self.methods)} too"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeForInference(Step):
    """The model is put into eval mode, and its parameters need no gradient."""

    splits: ClassVar[bool] = False

    def describe(self) -> str:
        """See `Step.describe`."""
        return "eval mode, no gradients"


def to_data(value: Any) -> Any:
    """Return ``value`` as JSON data that is the same in every process.

    Classes become their qualified names, functions their qualified names and a hash of their source.
    """
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(value[key]) for key in sorted(value, key=str)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, functools.partial):
        return {"kind": "partial", "call": to_data((value.func, value.args, value.keywords))}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(to_data(item), sort_keys=True) for item in value)
    if isinstance(value, enum.Enum | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), None if value.is_meta else value.detach().cpu().tolist()]
    if callable(value):
        return _callable_data(value)
    # Any other value (a config object, a tensor) is known by its type: addresses differ between processes.
    return to_data(type(value))


def _callable_data(value: Callable[..., Any]) -> str:
    function = inspect.unwrap(value)
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        source = repr((code.co_code, code.co_consts, code.co_names)) if code else ""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    captured = [cell for cell in cells if not inspect.isclass(cell) and cell is not function]
    source += json.dumps([to_data(captured), to_data(getattr(function, "__defaults__", None))], sort_keys=True)
    return f"{name}#{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that refers to itself before it is bound
        return False
