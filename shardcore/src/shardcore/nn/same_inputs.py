"""Models whose tensor-parallel ranks compare, every so often, what they are called with.

The likeliest mistake with a sharded model is another batch on each of its ranks, from a sampler that divides data by
ranks and not by replicas. Nothing fails then: sums are made of different activations, and the loss looks plausible.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shardcore._torch import backward_task, in_transform
from shardcore.comm.dtensor_params import local_tensor, splits_on_tp
from shardcore.errors import NotSupportedError
from shardcore.mesh.random_stream import TWO_THREADS
from shardcore.nn.base import ParallelMixin
from shardcore.nn.mixin import add_mixin

#: What tells values from others: a checksum of those that are equal bit by bit; the sum and the norm of what each rank
#: has computed by itself, and how far they may be apart, relative to the norm; "" where values are not compared.
Check: TypeAlias = str | list[float]

#: What a rank was called with: (argument, what it is, its values) for each.
Brought: TypeAlias = list[tuple[str, str, Check]]

#: Compares what this rank brought with what others have; raises on all of them alike.
Meet = Callable[[Brought], None]


#: The name under which the kind of call stands among the arguments.
KIND = "(the kind of call)"

#: That of the parameters of which every rank has the whole.
ALIKE = "(the parameters that all ranks have whole)"

# What a rank wants back: no collective depends on it, so that ranks may differ in it.
_OF_A_RANK = ("return_dict", "use_cache")

_FIRST = 3  # calls that are compared in any case
_SHOWN = 6  # numbers of a tensor in an error
_DEEP = 3  # containers within containers that are looked into

# What ranks compute alike may differ in its last bits, also in half precision; other batches differ by much more.
_COMPUTED = 1e-2
# So may gradients of whole parameters, on accelerators above all. A step that one rank makes alone changes more than
# their bits do in thousands of steps.
_HELD_ON_CPU, _HELD = 1e-7, 1e-4


def _is_due(number: int, every: int) -> bool:
    """Tell whether the call with this ``number`` is compared: the first ones, then ever fewer, and each ``every``-th.

    Ranks that part early in a run are found soon: the fourth, the eighth, the sixteenth call and so on are compared.
    """
    return number < _FIRST or number % every == 0 or (number + 1).bit_count() == 1


class SameInputs(ParallelMixin):
    """A module that compares its inputs over its tensor-parallel ranks, in the first calls and then now and then.

    Also where calls become others, as an evaluation or a generation after steps of training: there one rank is most
    likely to be alone.
    """

    keeps_name: ClassVar[bool] = True

    _inputs_calls: int
    _inputs_every: int
    _inputs_begun: int  # the call up to which generations were compared
    _inputs_meet: Meet
    _inputs_checksum: Callable[[Tensor], str]
    _inputs_kind: tuple[bool, bool]  # of the last call: training, with gradients
    _inputs_open: list[int]  # the threads in which a call of the model is under way: one at most

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, if all ranks call it with the same: before hooks, of which FSDP2's wait for other ranks.

        Raises:
            AgreementError: they do not; on every rank.
            MissingRanksError: some ranks do not call it within the timeout of the process group.
        """
        return self._within(super().__call__, args, kwargs)

    def _within(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``, which calls the model, after comparing what it is called with if it is due."""
        if torch.compiler.is_compiling() or backward_task() != -1 or self._is_open():
            return function(*args, **kwargs)
        number, kind = self._inputs_calls, (self.training, torch.is_grad_enabled())
        self._inputs_open.append(threading.get_ident())
        own = self.__dict__
        own["_inputs_calls"] = number + 1
        try:
            if _is_due(number, self._inputs_every) or kind != self._inputs_kind:
                self._compare(args, kwargs)
            own["_inputs_kind"] = kind
            return function(*args, **kwargs)
        finally:
            self._inputs_open.clear()

    def _is_open(self) -> bool:
        """Tell whether this is within a call, or a comparison, that has begun already; refuse another thread's."""
        if self._inputs_open and self._inputs_open[0] != threading.get_ident():
            raise NotSupportedError(TWO_THREADS)
        return bool(self._inputs_open)

    def compare_generation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the tensors that a generation begins with, if as many calls were made as between comparisons.

        With a cache each of its calls but one brings a token, which ranks with other texts may have alike; and an
        encoder is not called through the model. Settings may differ: a streamer is for one rank. Raises as a call does.
        """
        every, number = self._inputs_every, self._inputs_calls
        if self._is_open() or not (number < _FIRST or number - self._inputs_begun >= every):
            return
        self.__dict__["_inputs_begun"] = number - number % every
        self._inputs_open.append(threading.get_ident())
        try:
            tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
            self._compare(args, tensors, generates=True)
        finally:
            self._inputs_open.clear()

    def _compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, generates: bool = False) -> None:
        mode, gradients = "training" if self.training else "evaluation", "" if torch.is_grad_enabled() else "out"
        kind = "a generation" if generates else f"a call in {mode} mode, with{gradients} gradients"
        by_name = sorted((name, value) for name, value in kwargs.items() if name not in _OF_A_RANK)
        named = [*((f"the argument at position {i}", v) for i, v in enumerate(args)), *by_name]
        leaves = [leaf for name, value in named for leaf in _leaves(name, value, _DEEP)]
        if any(isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta) for _, value in leaves):
            return  # nothing is computed
        if in_transform() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # untyped in torch
            return  # the model refuses it
        brought: Brought = [(KIND, kind, ""), *((name, *self._told(value)) for name, value in leaves)]
        for name, tensor in itertools.chain(self.named_parameters(), self.named_buffers()):
            if tensor.is_meta:
                raise NotSupportedError(
                    f"this {type(self).__name__} was called while its {name} is on meta, without values: give all that "
                    "it holds values first, with shardcore.initialize(model) (buffers that its code computes are in no "
                    "state dict), or as you shard: shard(model, ..., weights=...)"
                )
        if held := [local_tensor(parameter) for parameter in self.parameters() if _is_whole(parameter)]:
            brought.append((ALIKE, "", _numbers(held, _HELD_ON_CPU if held[0].device.type == "cpu" else _HELD)))
        self._inputs_meet(brought)

    def _told(self, value: Any) -> tuple[str, Check]:
        if not isinstance(value, Tensor):
            return repr(value)[:80], ""
        what = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, DTensor):
            return what, ""  # of this rank alone
        if value.requires_grad:
            return what, _numbers([value.detach()], _COMPUTED)
        first = ", ".join(f"{number:.4g}" for number in value.detach().reshape(-1)[:_SHOWN].tolist())
        return f"{what} that begins with {first}", self._inputs_checksum(value)


class SameInputsOfModel(SameInputs):
    """A model that compares its inputs also where a wrapper calls its forward by itself."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward; see `__call__`."""
        return self._within(super().forward, args, kwargs)


def compare_inputs(modules: Sequence[nn.Module], every: int, checksum: Callable[[Tensor], str], meet: Meet) -> None:
    """Let a sharded model compare the inputs of its first calls, and of each ``every``-th; for all ranks alike.

    The first of the ``modules`` is the model; calls of the others, which are parts of it, are compared where they are
    not within one of the model.
    """
    opened: list[int] = []
    for module in modules:
        context = module.__dict__["_shard_context"]
        add_mixin(module, SameInputsOfModel if module is modules[0] else SameInputs)
        module.__dict__.update(
            _shard_context=context,
            _inputs_calls=0,
            _inputs_every=every,
            _inputs_begun=0,
            _inputs_meet=meet,
            _inputs_checksum=checksum,
            _inputs_kind=(True, True),
            _inputs_open=opened,
        )


def _is_whole(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and parameter.is_floating_point() and not splits_on_tp(parameter)


def _numbers(tensors: Sequence[Tensor], tolerance: float) -> list[float]:
    """Return the sum and the norm of all elements, and ``tolerance``."""
    found = []
    for tensor in tensors:
        values = tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
        found.append(torch.stack([values.sum(), values.norm()]).double())
    sums, norms = torch.stack([numbers.to(found[0].device) for numbers in found]).unbind(1)
    return [*torch.stack([sums.sum(), norms.norm()]).tolist(), tolerance]


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in an argument; other objects are left out.

    So are floating-point tensors inside of containers: captured states and caches hold the heads of one rank.
    """
    inside = depth < _DEEP
    if isinstance(value, Tensor):
        if not (inside and value.is_floating_point()):
            yield name, value
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, value
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item, depth - 1)
