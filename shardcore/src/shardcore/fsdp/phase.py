"""What goes around one sharded model: data parallelism, and an optimizer of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from shardcore._private import PIPELINES, require
from shardcore.agree.fingerprint import Item, optimizer_items
from shardcore.config.pipelining import SPLIT_SCHEDULES
from shardcore.errors import ConfigError, NotSupportedError, PlanError
from shardcore.fsdp.data_parallel import apply_data_parallel, unwrappable
from shardcore.fsdp.optimizers import check_optimizer, repoint, tied_outside
from shardcore.mesh import DATA_AXES, ShardContext, axis_name
from shardcore.plan import ShardPlan
from shardcore.plan.phases import ModelPhase

__all__ = ["Fsdp", "Wrap"]


#: Whether FSDP2 is applied over the data axes, or with which of its options.
Wrap: TypeAlias = bool | Mapping[str, Any]

#: The options of FSDP2 that `Wrap` may hold, and what each may be.
_OPTIONS: dict[str, tuple[type, ...]] = {
    "mp_policy": (MixedPrecisionPolicy,),
    "offload_policy": (OffloadPolicy,),
    "reshard_after_forward": (bool, int, type(None)),
}


class Fsdp(ModelPhase):
    """What is to be done to a model after it was sharded, and what has to hold for it before.

    Args:
        model: the model, unsharded yet, as the caller has it.
        optimizer: an optimizer of its parameters, or None.
        wrap: whether FSDP2 is applied over the data axes, or its options.
        inner: the model inside of it that is sharded, if it is another one.

    Raises:
        ConfigError: ``wrap`` is something else.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, *, wrap: Wrap, inner: nn.Module | None = None
    ) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        # A stage of a pipeline has a tied parameter under the names of its own parts.
        self._first = {name: self._names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._outer, self._model = model, model if inner is None else inner
        self._optimizer, self._wrap, self._options = optimizer, wrap is not False, _options(wrap)

    def check(self, plan: ShardPlan) -> None:
        """Refuse what would fail after the model was changed."""
        if self._optimizer is not None:
            check_optimizer(self._optimizer, self._names)
        config, given = plan.config, ", ".join(map(repr, self._options))
        if config.ranks > 1:
            for name, other in tied_outside(self._outer).items():
                raise NotSupportedError(
                    f"{name} of {type(self._outer).__name__} is {other} too, of a module outside of it, and would come "
                    "apart: shard the model that holds both; or, if they are to be trained apart, give that module a "
                    f"copy first: module.{other.rpartition('.')[2]} = torch.nn.Parameter(parameter.detach().clone())"
                )
        if given and config.ranks == 1:
            raise ConfigError(
                f"wrap= has options of FSDP2 ({given}), which needs a process group of two ranks at least: start more "
                "with torchrun, or leave them out"
            )
        if given and not _has_data_axis(plan):
            raise ConfigError(
                f"wrap= has options of FSDP2 ({given}), and nothing says over which ranks it is applied: give "
                "device_mesh an axis 'dp_shard' (of one rank, if there are no more)"
            )
        if "reshard_after_forward" in self._options and config.parameter_shards == 1:
            raise ConfigError(
                "wrap={'reshard_after_forward': ...} says when parameters that FSDP2 has divided are let go, and "
                "dp_shard_size is 1: nothing is divided; leave it out"
            )
        if config.pipeline_schedule in SPLIT_SCHEDULES and self._options.get("reshard_after_forward"):
            raise ConfigError(
                f"wrap={{'reshard_after_forward': ...}} with pipeline_schedule={config.pipeline_schedule!r}, which "
                "computes gradients of inputs and of parameters apart: parameters that were let go after the forward "
                "would get none. Leave it out, or use '1f1b' or 'interleaved'"
            )
        if (config.pipeline_parallel_size or 1) > 1:
            self._check_in_pipeline()
            if (config.data_parallel_size or 1) > 1:
                require(PIPELINES)
        experts = config.expert_parallel_size or 1
        if not self._wrap and experts > 1:
            raise ConfigError(
                f"wrap=False with expert_parallel_size {experts}: experts and the rest of a model are divided over "
                "different ranks, which shard() knows; leave wrap=True, or give wrap= options of FSDP2"
            )
        if not self._wrap and (config.context_parallel_size or 1) > 1:
            raise ConfigError(
                f"wrap=False with context_parallel_size {config.context_parallel_size}: each rank has the gradients of "
                "its own tokens, and FSDP2 over the ranks of cp is what adds them up; leave wrap=True, or give wrap= "
                "options of FSDP2"
            )
        if self._wrap and (problems := unwrappable(self._model, plan)):
            raise PlanError(f"{type(self._model).__qualname__} cannot be wrapped by FSDP2", problems)

    def _check_in_pipeline(self) -> None:
        precision = self._options.get("mp_policy")
        casts = precision is not None and (precision.output_dtype is not None or not precision.cast_forward_inputs)
        if casts or "offload_policy" in self._options:
            what = "output_dtype, or cast_forward_inputs=False, of mp_policy" if casts else "'offload_policy'"
            raise NotSupportedError(f"wrap= with {what} is not supported together with a pipeline; leave it out")

    @property
    def dtype(self) -> torch.dtype | None:
        """What FSDP2 will cast parameters and inputs to; None if it does not."""
        precision = self._options.get("mp_policy")
        return None if precision is None else precision.param_dtype

    def items(self) -> Iterator[Item]:
        """Yield what has to be the same on every rank."""
        yield "the argument wrap", str(dict(sorted(self._options.items())) or self._wrap)
        yield "the argument optimizer", "given" if self._optimizer else "not given"
        if self._optimizer is not None:
            yield from optimizer_items(self._optimizer, self._names)

    def runs(self, context: ShardContext | None) -> bool:
        """Where there are replicas, options of FSDP2, or an optimizer."""
        if context is None:
            return False
        wraps = bool(self._options) or (self._wrap and context.mesh.size() > context.size)
        return wraps or self._optimizer is not None

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Wrap the sharded model and re-point the optimizer."""
        assert context is not None  # or else it does not run
        if self._wrap:
            apply_data_parallel(self._model, context, plan.stages, **self._options)
        if self._optimizer is not None:
            held = self._outer.named_parameters(remove_duplicate=False)
            new = {self._first.get(name, name): parameter for name, parameter in held}
            repoint(self._optimizer, self._names, new, divided=context.sizes.pp > 1)


def _options(wrap: object) -> dict[str, Any]:
    """Return the options of FSDP2 that ``wrap`` holds."""
    if isinstance(wrap, bool):
        return {}
    if not isinstance(wrap, Mapping):
        raise ConfigError(f"wrap= must be True, False or a mapping of options of FSDP2, got {wrap!r}")
    for name, value in wrap.items():
        if name not in _OPTIONS:
            raise ConfigError(f"wrap= has no option {name!r}; the options of FSDP2 are {', '.join(_OPTIONS)}")
        if not isinstance(value, _OPTIONS[name]):
            wanted = " or ".join(kind.__name__ for kind in _OPTIONS[name])
            raise ConfigError(f"wrap={{{name!r}: ...}} must be a {wanted}, got {value!r}")
    return dict(wrap)


def _has_data_axis(plan: ShardPlan) -> bool:
    if (mesh := plan.config.device_mesh) is not None:
        return any(axis_name(mesh, axis) for axis in DATA_AXES)
    return plan.config.tensor_parallel_process_group is None
