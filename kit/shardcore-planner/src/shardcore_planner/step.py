"""One step of a sharded model under watch: on fake tensors for a plan, on real ones to compare it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcore.mesh.context import ShardContext, context_of
from shardcore.mesh.random_stream import RandomStream
from shardcore.nn.partial import reduce_partial_gradients
from shardcore_planner.watch import Numbers, Watch
from shardcore_planner.workload import Call, Stepper, Workload

#: Blocks, each with what its place is called: several may be called alike.
Places = Sequence[tuple[str, nn.Module]]


def run_step(
    model: nn.Module, call: Call, stepper: Stepper, workload: Workload, watch: Watch, places: Places = ()
) -> Numbers:
    """Run two steps of a sharded model, and return what was seen in the second.

    The first one makes the state of the optimizer, and whatever else is made once.

    Args:
        model: the model, in the mode of the workload.
        call: how it is called.
        stepper: its optimizer.
        workload: what the step is made of.
        watch: looks on; fresh.
        places: blocks whose surroundings are told apart in the peaks, by what to call them.

    Returns:
        Bytes by ``("held", kind)``, of what lives from step to step and of gradients; ``("kept",)``, of what the
        forward leaves alive; ``("peak", phase, place, kind)``; ``("sent", phase, operation, group, "bytes" or
        "count")``; and what `Watch.work` has.
    """
    inputs = call.inputs()
    with torch.set_grad_enabled(workload.trains):
        out = call.forward(model, inputs)
        if workload.trains:
            call.loss(out).backward()
            sum_partial(model)
            stepper.step()
        del out
    watch.owns("parameters", model.parameters())
    watch.owns("optimizer", stepper.state())
    watch.finds_gradients(stepper.gradients)
    handles = [handle for name, block in places for handle in follow(watch, name, block)]
    found: Numbers = Counter()
    try:
        with watch, torch.set_grad_enabled(workload.trains):
            out = call.forward(model, inputs)
            if workload.trains:
                loss = call.loss(out)
                del out
            alive = watch.now()
            found["kept",] = alive["activations"]
            if workload.trains:
                watch.phase, watch.place = "backward", "behind the blocks"
                loss.backward()
                sum_partial(model)
                alive["gradients"] = watch.now()["gradients"]
                watch.phase, watch.place = "optimizer", ""
                stepper.step()
    finally:
        for handle in handles:
            handle.remove()
    for kind in ("parameters", "gradients", "optimizer"):
        found["held", kind] = alive[kind]
    found.update({("peak", *key): size for key, size in watch.peaks.items()})
    found.update({("sent", *key): size for key, size in watch.sent.items()})
    found.update(watch.work)
    return found


def sum_partial(model: nn.Module) -> None:
    """Sum the partial gradients that wait for the end of the step."""
    context = context_of(model)
    if context is not None and context.defers:
        reduce_partial_gradients(model)


def follow(watch: Watch, name: str, block: nn.Module) -> Sequence[Any]:
    """Tell the watch when the step enters and leaves a block, forward and backward."""

    def inside(*_: Any) -> None:
        watch.place = name

    def outside(*_: Any) -> None:
        watch.place = "outside the blocks"

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        inside()
        if name.endswith("first") and (x := _differentiable((*args, *kwargs.values()))) is not None:
            x.register_hook(outside)

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        outside()
        x = _differentiable(out if isinstance(out, tuple | list) else (out,))
        if x is not None:
            x.register_hook(inside)

    return (
        block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        block.register_forward_hook(leave),
    )


def _differentiable(values: Sequence[Any]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor) and value.requires_grad), None)


def to_fake(model: nn.Module) -> None:
    """Bring a model from the meta device to the CPU, with ties kept; to be called under fake tensors."""
    made: dict[int, tuple[Tensor, Any]] = {}  # the old ones are kept, so that no id is used twice
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    trained = tensor.requires_grad
                    made[id(tensor)] = tensor, _parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
                if tensor is not None:
                    held[name] = made[id(tensor)][1]


def _parameter(tensor: Tensor, trained: bool) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=trained)


class _Still(RandomStream):
    """A stream that never moves: what is drawn from fake generators has no values to derive a seed from.

    The number that a call which may draw starts from is sent all the same.
    """

    def enter(self, draws: Callable[[], bool] = lambda: False) -> None:
        """Send a number where a call would, and draw none."""
        starts = self.follows and self.seed_of is not None and self.group is not None
        if starts and not self._levels and draws():
            dist.broadcast(torch.zeros((), dtype=torch.int64, device="cpu"), group=self.group, group_src=0)
        self._levels.append(0)

    def leave(self) -> None:
        """Note that a module has returned."""
        if self._levels:
            self._levels.pop()

    def fork(self, region: object, *, once: bool = False, rank: int | None = None) -> None:
        """Do nothing."""

    def join(self, region: object) -> None:
        """Do nothing."""


def still(context: ShardContext) -> None:
    """Stop the random stream of a sharded model."""
    context.random.__class__ = _Still
    if len(context.sharers) > 1:
        context.random.group = context.sharing_group  # simulated ranks had nobody to agree with


def groups_of(context: ShardContext | None) -> dict[str, tuple[str, int]]:
    """Return the axis and the size of every process group by its name; groups of neighbours are on ``tp``.

    FSDP2 divides parameters over ``cp`` too: its groups are on ``dp_shard`` where that has several ranks.
    """
    found: dict[str, tuple[str, int]] = {}
    if context is not None:
        shards = "dp_shard" if context.sizes.dp_shard > 1 else "cp"
        for mesh in (context.parameters, context.mesh):  # an axis of both is that of `mesh`
            for axis in mesh.mesh_dim_names or ():
                if (size := mesh[axis].size()) > 1:
                    named = shards if mesh is not context.mesh and axis == "dp_shard" else axis
                    found[str(mesh.get_group(axis).group_name)] = named, size
        if context.mesh is not context.parameters and len(context.sharers) > 1:
            found.setdefault(str(context.sharing_group.group_name), ("cp x tp", len(context.sharers)))
        for channel in context.neighbours.values():
            found[str(channel.group.group_name)] = "tp", channel.size
    return found


def by_axis(found: Numbers, context: ShardContext | None) -> Numbers:
    """Return numbers in which what is sent is told by axis and number of ranks, in the place of a process group."""
    groups = groups_of(context)
    named: Numbers = Counter()
    for key, size in found.items():
        if key[0] == "sent":
            axis, ranks = groups[key[3]]
            named[*key[:3], axis, str(ranks), key[4]] += size
        else:
            named[key] += size
    return named
