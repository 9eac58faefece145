"""One rank of many that are not there: collectives of torch's backend ``"fake"`` return at once and send nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.errors import ConfigError
from shardcore.pipeline.tracing import GROUPED, grouped
from shardcore_planner.kernels import OneKernel


@contextlib.contextmanager
def simulated_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Be ``rank`` of ``count`` ranks that are not there, for as long as this lasts.

    `shardcore.shard` works inside as on a machine of that many ranks; what a collective returns has no meaning.

    Raises:
        ConfigError: the process has a process group already, which is left as it is.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"{count} ranks cannot be simulated in a process that has a process group of {dist.get_world_size()}; plan "
            "in a process of its own, or by the command: shardcore plan MODEL"
        )
    hook = sys.excepthook  # to which torch adds the rank, once for each group
    dist.init_process_group("fake", rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        # torch keeps what operations on DTensors gave, with the mesh that they were on, and takes it for that of any
        # rank: a group that this process joins next has the same ranks, and this one may be another of them.
        debug._clear_sharding_prop_cache()


@contextlib.contextmanager
def holding_nothing(device: str) -> Iterator[Any]:
    """Compute with tensors that have no values, and keep what a ``device`` keeps: ``"cuda"`` or ``"cpu"``."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kernels = OneKernel() if device == "cuda" else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Certain(), kernels, _without_masks():
        yield fake


@contextlib.contextmanager
def _without_masks() -> Iterator[None]:
    """Have transformers leave the masks of full sequences out, as in a step; it takes fake tensors for an export."""
    masks = sys.modules.get("transformers.masking_utils")
    asks = getattr(masks, "is_tracing", None)
    if asks is None:
        yield
        return
    masks.is_tracing = lambda *_: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        masks.is_tracing = asks  # type: ignore[union-attr]


class Certain(TorchDispatchMode):
    """Answers what models ask of values, where tensors hold nothing.

    Fractions that are drawn one by one are 1: a model that leaves layers out at random asks whether they are below a
    limit, and leaves none out. Integers are 0; they are seeds. All of a tensor holds, and it has none of what is looked
    for: what is asked about is the mask of full sequences, and padding.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED:
            return torch.tensor(_ASKED[func])
        if func is GROUPED:
            return grouped(*args, **(kwargs or {}))
        drawn = _DRAWN.get(func.overloadpacket)
        if drawn is not None and [] in args:
            return torch.tensor(drawn)
        return func(*args, **(kwargs or {}))


_ASKED = {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}
_DRAWN = {torch.ops.aten.rand: 1.0, torch.ops.aten.randint: 0}
