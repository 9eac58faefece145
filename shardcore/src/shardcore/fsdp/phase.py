"""The data axes, by FSDP2, and the caller's optimizer: around a model that was sharded along ``tp``, or not at all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from shardcore._private import PIPELINES, require
from shardcore.agree.agreement import is_alone
from shardcore.agree.fingerprint import Item, optimizer_items
from shardcore.comm.dtensor_params import is_packed
from shardcore.comm.strided import fsdp_placement
from shardcore.config.pipelining import SPLIT_SCHEDULES
from shardcore.errors import ConfigError, NotSupportedError, PlanError, Problem
from shardcore.fsdp.optimizers import check_optimizer, repoint, tied_outside
from shardcore.fsdp.same_units import SameUnits
from shardcore.fsdp.scalars import replicate_scalars
from shardcore.fsdp.units import prepare_units, require_known_fsdp
from shardcore.mesh.axes import DATA_AXES, Sizes, axis_name
from shardcore.mesh.context import ShardContext
from shardcore.nn import SegmentedLayout
from shardcore.nn.experts.expert_parallel import ExpertParallel
from shardcore.plan import ShardPlan
from shardcore.plan.shard_plan import ModelPhase
from shardcore.policy import Stages
from shardcore.transfer.fp8 import Fp8Gather


def apply_data_parallel(
    model: nn.Module, context: ShardContext, stages: Stages | None, *, fp8: bool = False, **options: Any
) -> None:
    """Apply FSDP2 to every block and to the rest of ``model``, in place.

    Without replicas it does nothing, unless ``options`` say what it is to do besides, such as computing in bfloat16.

    ``dp_shard`` shards parameters, gradients and optimizer state (`torch.distributed.fsdp.fully_shard`);
    ``dp_replicate`` keeps whole copies whose gradients are averaged; both together are hybrid sharding. Any part of the
    model may be called by itself afterwards (`shardcore.fsdp.units`).

    The model was sharded along ``tp`` before. ``stages`` names the list of blocks; without it the model is wrapped as
    one. With ``fp8`` parameters are gathered in 8 bits. ``options`` are those of ``fully_shard`` (``mp_policy``,
    ``offload_policy``, ``reshard_after_forward``, ``shard_placement_fn``, which is not asked about fused weights).
    """
    sizes = Sizes.of(context.parameters)
    if sizes.replicas == 1 and not options:
        return
    wide, axes = _wide(context), data_axes(context)
    mesh = context.parameters[axes]
    ignored = (*replicate_scalars(model, context, axes), *filter(is_packed, model.parameters()))
    options["ignored_params"] = {*(options.get("ignored_params") or ()), *ignored}
    gathers = wide != ("dp_replicate",)
    wrap: Callable[..., Any] = fully_shard
    if not gathers:  # FSDP2's engine without sharding: DistributedDataParallel cannot hold DTensor parameters
        from torch.distributed._composable.replicate_with_fsdp import replicate as wrap
    if gathers and any(fsdp_placement(p) for p in model.parameters()):
        others = options.get("shard_placement_fn")
        options["shard_placement_fn"] = lambda p: fsdp_placement(p) or (None if others is None else others(p))
    lists = stages.lists if stages else ()
    blocks = [block for name in lists for block in model.get_submodule(name).children()]
    blocks = [block for block in blocks if any(True for _ in block.parameters())]  # else of another stage of a pipeline
    blocks = _untied(model, blocks)
    if sizes.pp > 1 and gathers:
        options.setdefault("reshard_after_forward", False)  # see `shardcore.fsdp.accumulation`
    experts = [module for module in model.modules() if isinstance(module, ExpertParallel)]
    meet = None if is_alone() or mesh.size() == 1 else SameUnits(model, mesh, gathers=gathers)
    for unit in prepare_units(model, [*experts, *blocks], meet=meet):
        over, given = mesh, options
        if isinstance(unit.module, ExpertParallel) and context.experts is not None:
            over, given = context.experts[wide], _of_experts(unit.module, options)
        wrapped = wrap(unit.module, mesh=over, **given)
        if fp8 and gathers and over.size(-1) > 1:
            wrapped.set_custom_all_gather(Fp8Gather())
        unit.watch()
    model.__dict__["__deepcopy__"] = _refuse_to_be_copied  # of the instance: FSDP2's class has its own


def _untied(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks whose parameters nothing outside of them holds: FSDP2 takes a parameter into one unit.

    All of the others, as those of Zamba 2 that have one transformer in common, belong to the unit of the model.
    """

    def held(part: nn.Module) -> Counter[int]:
        return Counter(id(p) for module in part.modules() for p in module._parameters.values() if p is not None)

    everywhere = held(model)
    return [block for block in blocks if held(block).items() <= everywhere.items()]


def _refuse_to_be_copied(memo: Any) -> NoReturn:
    raise NotSupportedError(
        "a model with data parallelism cannot be copied: FSDP2 holds its parameters. Build and shard a second one in "
        "the same way, and give it the weights: second.load_state_dict(model.state_dict()). For a mean of the weights, "
        "call after each step torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)(list(second.parameters()), "
        "list(model.parameters()), None)"
    )


def data_axes(context: ShardContext) -> tuple[str, ...]:
    """Return the names that the mesh of parameters has for the data axes that FSDP2 is applied over."""
    return tuple(axis_name(context.parameters, axis) or axis for axis in _wide(context))


def _wide(context: ShardContext) -> tuple[str, ...]:
    sizes = Sizes.of(context.parameters)
    found = (("dp_replicate", sizes.dp_replicate), ("dp_shard", sizes.dp_shard))
    return tuple(axis for axis, size in found if size > 1) or ("dp_shard",)


def _of_experts(module: ExpertParallel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of FSDP2 for a module of whole experts, which stands in a block of its own."""
    dims = {id(p): module.dim_of_data(name) for name, p in module._parameters.items() if p is not None}
    own = {**options, "shard_placement_fn": lambda p: Shard(dims[id(p)])}
    if (policy := options.get("mp_policy")) is not None:
        # What the block computes in full precision, the weights of a token's experts, comes as it is.
        own["mp_policy"] = dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)
    return own


def unwrappable(model: nn.Module, plan: ShardPlan) -> list[Problem]:
    """Return what FSDP2 would refuse of ``model`` once it is sharded by ``plan``, after it was changed.

    Raises:
        NotSupportedError: the installed torch has an FSDP2 that shardcore does not know.
    """
    config = plan.config
    shards = config.parameter_shards
    if shards * (config.dp_replicate_size or 1) == 1:
        return []
    require_known_fsdp()
    alone = (config.tensor_parallel_size or 1) == 1
    problems = []
    for parameter in plan.parameters:
        what = todo = ""
        layout = parameter.layout
        fused = not alone and isinstance(layout, SegmentedLayout) and layout.dim == 0 and len(parameter.shape) > 1
        if (
            not parameter.shape
            and getattr(layout, "partial_gradient", False)
            and config.partial_gradients == "deferred"
        ):
            what = "FSDP2 cannot shard a parameter without dims, whose gradient would stay partial until it is summed"
            todo = "give it the shape (1,), or leave partial_gradients='in_backward'"
        elif fused and parameter.shape[1] % shards:
            what = (
                f"FSDP2 cuts this fused weight {parameter.shape} along dim 1, whose {parameter.shape[1]} columns "
                f"{shards} ranks do not divide"
            )
            todo = f"use a dp_shard_size that divides {parameter.shape[1]} (dp_replicate_size for the rest)"
        elif alone and not model.get_parameter(parameter.name).is_contiguous():
            what, todo = "FSDP2 cannot shard a parameter that is not contiguous", "make it so: p.data = p.contiguous()"
        if what:
            problems.append(Problem(where=parameter.name, rule="(data parallelism)", what=what, todo=todo))
    return problems


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

    The model is as the caller has it; ``inner`` is the one that is sharded, itself or one inside of it.

    Raises:
        ConfigError: ``wrap`` is something else.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, optimizer: Optimizer | None, wrap: Wrap) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        # A stage of a pipeline has a tied parameter under the names of its own parts.
        self._first = {name: self._names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self._outer, self._model = model, inner
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
            apply_data_parallel(self._model, context, plan.stages, fp8=plan.config.fp8_communication, **self._options)
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
