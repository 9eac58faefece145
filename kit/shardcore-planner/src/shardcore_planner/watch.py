"""Looking at one step as it runs, on fake tensors or on real ones: what is alive, and what is sent."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardcore._torch import FakeTensor
from shardcore_planner.cards import Card

#: What memory is taken by, from what stays to what comes and goes.
KINDS = ("parameters", "gradients", "optimizer", "temporaries", "activations")

#: By the names of c10d and of functional collectives. On the CPU `shardcore.comm.collectives` sends a reduce-scatter as
#: an all-to-all of equal pieces; of an exchange, the pieces have sizes.
OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}

_SENDS = ("c10d", "_c10d_functional")

#: What sends nothing: the other end of a send, and what accompanies a functional collective.
_BESIDES = ("recv", "wait_tensor", "_wrap_tensor_autograd")

_ATEN = torch.ops.aten


def _of_groups(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


#: What torch counts operations of, and what it does not: products in place, attention on CPUs, and grouped products.
_COUNTED: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN.baddbmm_: flop_registry[_ATEN.baddbmm],
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    _ATEN._grouped_mm: _of_groups,
}

Numbers = Counter[tuple[str, ...]]


class Watch(TorchDispatchMode):
    """Notes the memory that tensors take while it is active, the collectives that run, and how much is computed.

    The memory is that of all storages which an operation has seen and which are still alive, after each operation;
    what a kernel takes and gives back inside is not seen. Kinds are ``parameters``, ``gradients``, ``optimizer`` (its
    state), ``temporaries``, which the step of the optimizer makes, and ``activations``, which is all the rest: what the
    forward keeps, gathered weights, buffers, inputs.

    Args:
        fake: count fake tensors of this mode alone (what DTensor computes shapes with is of another); None counts
            real ones.
        card: how fast operations are, where their time is asked for.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``; set by whoever runs the step.
        place: where in the phase; set like it.
        peaks: the most bytes at once, by (phase, place, kind), of the moment with the most altogether (``"all"``).
        sent: by (phase, operation, group, ``"count"`` or ``"bytes"``); bytes are of the whole tensor that is reduced,
            gathered or scattered.
        work: by ``("operations", phase)`` multiplications and additions of products, convolutions and attention, as
            `torch.utils.flop_counter` counts them (of causal attention all); by ``("calls", phase)`` the operations
            that the host calls; with a card, by ``("device", phase)`` the nanoseconds that the device takes for them.
    """

    def __init__(self, fake: Any = None, card: Card | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.phase, self.place = "forward", ""
        self.peaks: Numbers = Counter()
        self.sent: Numbers = Counter()
        self.work: Numbers = Counter()
        self._fake, self._card = fake, card
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: Bytes of each, when it was last looked at: what FSDP2 makes empty is not seen at once.
        self._sizes: dict[int, int] = {}
        #: Their sum: never less than what is alive.
        self._total = 0
        self._kinds: dict[int, str] = {}
        self._gradients: Callable[[], Iterable[Tensor]] = tuple

    def owns(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors`` as ``kind`` from here on."""
        for tensor in map(local, tensors):
            self._see(tensor)
            self._kinds[id(tensor.untyped_storage())] = kind

    def finds_gradients(self, find: Callable[[], Iterable[Tensor]]) -> None:
        """Count as gradients the tensors that ``find`` returns whenever it is asked."""
        self._gradients = find

    def now(self) -> Counter[str]:
        """Return the bytes that are alive, by kind, with ``"all"`` for their sum."""
        own = {id(local(tensor).untyped_storage()) for tensor in self._gradients()}
        found: Counter[str] = Counter()
        for key, storage in self._storages():
            kind = "gradients" if key in own else self._kinds.get(key, "activations")
            found[kind] += self._measure(key, storage)
        found["all"] = found.total()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what DTensor does inside is seen
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, out)):
            self._see(tensor)
        self._note_peak()
        count = _COUNTED.get(func.overloadpacket)
        operations = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        if operations:
            self.work["operations", self.phase] += operations
        self.work["calls", self.phase] += 1
        if self._card is not None and not _is_view(func):
            tensors = [local(tensor) for tensor in _tensors((args, kwargs, out))]
            dtype = tensors[0].dtype if tensors else None
            self.work["device", self.phase] += round(
                1e9 * self._card.time(operations, sum(map(nbytes, tensors)), dtype)
            )
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0].strip("_")
        if namespace in _SENDS and name not in _BESIDES:
            sized = name == "alltoall_base" and any(isinstance(arg, list) and arg for arg in args)
            key = self.phase, "all_to_all" if sized else OPERATIONS.get(name, name), _group(args)
            self.sent[*key, "count"] += 1
            self.sent[*key, "bytes"] += max((nbytes(tensor) for tensor in _tensors((args, out))), default=0)
        return out

    def _see(self, tensor: Tensor) -> None:
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        if mode is not self._fake or (mode is None and tensor.is_meta):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
            if self.phase == "optimizer":
                self._kinds[key] = "temporaries"
        self._measure(key, storage)

    def _measure(self, key: int, storage: torch.UntypedStorage) -> int:
        size = storage.nbytes()
        self._total += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        return size

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._kinds.pop(key, None)
        self._total -= self._sizes.pop(key, 0)

    def _storages(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        for key, found in list(self._alive.items()):
            if (storage := found()) is not None:
                yield key, storage

    def _note_peak(self) -> None:
        # Most operations come to no peak, and to measure all that is alive takes longer than the step.
        peak = self.peaks[self.phase, self.place, "all"]
        if self._total <= peak:
            return
        alive = self.now()
        if alive["all"] > peak:
            for kind in (*KINDS, "all"):
                self.peaks[self.phase, self.place, kind] = alive[kind]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


def _is_view(operation: Any) -> bool:
    """Tell whether an operation returns views, or sends: neither computes anything."""
    aliases = (returned.alias_info for returned in operation._schema.returns)
    return operation.namespace in _SENDS or any(alias is not None and not alias.is_write for alias in aliases)


def _group(args: Any) -> str:
    """Return the name of the process group among the arguments of a collective."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):  # the group comes before any other object
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return next((arg for arg in reversed(args) if isinstance(arg, str)), "")


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
