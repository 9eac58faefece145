"""Modules of FSDP2 that may be called in any way: any part of them, by itself, in any order, and by ``forward``.

FSDP2 gathers the parameters of a *unit* (a block, or the model with all that is in no block) in a hook on the call of
that one module, and takes for the root whichever unit is called first. So by itself it works only for calls of the
whole model. Here every module knows the unit that holds its parameters: called while the unit is not, it runs as if it
were a method of the unit, with everything that FSDP2 does before and after a forward. The model is the root whatever
is called first. Which collectives run follows from the calls alone, which have to be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils._pytree import tree_leaves

from shardcore._private import DATA_PARALLEL, TESTED, complaint, missing
from shardcore._torch import backward_task
from shardcore.comm.gradients import PASSES
from shardcore.errors import NotSupportedError, ShardcoreWarning
from shardcore.nn.base import ParallelMixin
from shardcore.nn.calls import UNIT
from shardcore.nn.mixin import add_mixin

#: Called before something may be sent for a unit, in its "forward" or "backward".
Meet: TypeAlias = "Callable[[FSDPUnit, str], None]"


_CUT_SHORT = (
    "a backward of {} was cut short: its gradients are dropped, and those that were accumulated before it without sums "
    "over the replicas. Call optimizer.zero_grad(), and begin the accumulation of this step again"
)


class FSDPUnit:
    """The parameters that FSDP2 gathers together, and whether the call that holds them gathered is running.

    Args:
        module: the module that `fully_shard` (or ``replicate``) is applied to.
        root: the unit of the whole model; None if it is this one.
        meet: see `prepare_units`; None as soon as it has nothing to compare any more.
    """

    def __init__(self, module: nn.Module, root: FSDPUnit | None = None, *, meet: Meet | None = None) -> None:
        self.module = module
        self.meet = meet
        self.root = root or self
        self._inside = False
        self._holds = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPUnit:
        return self  # the copy of a part is none of the unit's modules

    def watch(self) -> None:
        """Take over from FSDP2, which has been applied to the module by now."""
        # FSDP2 has made a class of the module's own. A library that finds what a model can capture by what its class
        # prints as would capture nothing under another name, without a word.
        wrapped = type(self.module)
        ours = next(c for c in wrapped.__mro__[1:] if issubclass(c, InFSDPUnit))
        wrapped.__module__, wrapped.__qualname__ = ours.__module__, ours.__qualname__
        self._idle = self._state()._training_state
        register_fsdp_forward_method(self.module, "_as_unit")

    def begin(self) -> None:
        """See to it that the root of FSDP2 is the model, before any other of its units is called."""
        state = self.root._state()
        if state._is_root is None:  # also decided already where a module of the user's holds the model, and is the root
            state._lazy_init()
        if self.root._phase() == "PRE_BACKWARD" and backward_task() == -1 and not self.root._holds:
            self.root.reset(gradients=True)
            warnings.warn(_CUT_SHORT.format(type(self.root.module).__name__), ShardcoreWarning, stacklevel=2)
        if self.meet is not None:
            self.meet(self, "forward")

    def call(
        self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function``, which is the call of ``module``: the unit's, or one below it."""
        if module is not self.module:
            return self.run(function, args, kwargs)
        if self is self.root and not self._holds and self._phase() == "IDLE" and self._gathered():
            self.reset()  # after a forward without its backward: a step may have been taken since
        self.begin()
        out = function(*args, **kwargs)
        self._let_go()
        return out

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``, which uses parameters of the unit, with the parameters gathered."""
        if self._inside or self._phase() == "FORWARD":
            return function(*args, **kwargs)
        self.begin()
        out = self.module._as_unit(self._held(function), *args, **kwargs)  # type: ignore[operator]  # of `InFSDPUnit`
        self._let_go()
        return out

    def all(self) -> list[FSDPUnit]:
        """Return the units of the model, of which this is the root."""
        units = ((unit_of(module), module) for module in self.module.modules())
        return [unit for unit, module in units if unit is not None and unit.module is module]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep what the units of the model gather until the end: many calls follow one another."""
        self.root._holds += 1
        try:
            yield
        finally:
            self.root._holds -= 1
            with torch.no_grad():
                for unit in self.root.all():
                    unit._let_go()

    def _let_go(self) -> None:
        # FSDP2 leaves the root, what is replicated, and what it was told to keep, gathered for a backward. After a call
        # without gradients none comes: parameters() would be the gathered ones, which no optimizer reaches, and the
        # next call would not see what it has done meanwhile.
        idle = not self.root._holds and not self._inside and self._phase() == "IDLE"
        if idle and not torch.is_grad_enabled():
            self.module.reshard()  # type: ignore[operator]  # of FSDPModule

    def run_forward(
        self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``function``, which is the forward of ``module``: the unit's, or one below it.

        FSDP2 has gathered what the unit's own needs, unless somebody called it directly.
        """
        if module is not self.module or self._phase() == "IDLE":
            return self.run(function, args, kwargs)
        return self._held(function)(*args, **kwargs)

    def _held(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, True
            try:
                out = _no_views(function(*args, **kwargs))
                if self.meet is not None and torch.is_grad_enabled():
                    self._follow(out, self.meet)
                return out
            except BaseException:
                if self._phase() == "FORWARD":
                    self.reset()
                raise
            finally:
                self._inside = outer

        return held

    def _follow(self, out: Any, meet: Meet) -> None:
        # Before FSDP2's own hooks, which are hung on later.
        computed = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if computed:
            register_multi_grad_hook(computed, lambda _: meet(self, "backward"), mode="any")

    def reset(self, *, gradients: bool = False) -> None:
        """Forget a forward or a backward of the unit that was cut short; of the root, whatever ran in any unit.

        FSDP2 would believe it to be running still: what it has gathered would stay so, whatever an optimizer does to
        the parameters, and what it does at the end of a backward would never come again. With ``gradients``, those that
        were not summed over the replicas yet are dropped: no zero_grad() reaches them. A stage of a pipeline ends its
        forwards where the next one begins: it is held, and its root alone forgets them.
        """
        for unit in self.all() if self is self.root and not self._holds else [self]:
            state = unit._state()
            groups = parameter_groups(state)
            for each in (state, *groups):
                each._training_state = self._idle
            for parameter in (p for group in groups for p in group.fsdp_params if gradients):
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "unsharded_param", None)) is not None:  # gathered once at least
                    whole.grad = None
            if state._state_ctx.iter_forward_root is state:
                state._state_ctx.iter_forward_root = None
            if state._is_root:
                state._state_ctx.post_backward_final_callback_queued = False
            if not self.root._holds:
                unit.module.reshard()  # type: ignore[operator]  # of FSDPModule

    def _gathered(self) -> bool:
        return any(group.is_unsharded for group in parameter_groups(self._state()))

    def _phase(self) -> str:
        name: str = self._state()._training_state.name
        return name

    def _state(self) -> Any:
        return self.module._get_fsdp_state()  # type: ignore[operator]  # of FSDPModule


class _Alias(Function):
    """The same tensor, which is no view for autograd."""

    flow = PASSES

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _no_views(out: Any) -> Any:
    """Return what a module returned without views.

    FSDP2 hangs what it does in the backward on the tensors that leave a unit. An operation in place on a view would
    take it off; so does a linear's output on its way to a bias or a temperature.
    """
    if isinstance(out, Tensor):
        return _Alias.apply(out) if out._base is not None and out.requires_grad else out  # type: ignore[no-untyped-call]
    if type(out) in (tuple, list):
        plain = [_no_views(item) for item in out]
        return type(out)(plain) if any(a is not b for a, b in zip(plain, out, strict=True)) else out
    if isinstance(out, MutableMapping):  # outputs by name
        for name, value in out.items():
            if (plain := _no_views(value)) is not value:
                out[name] = plain
    return out


class InFSDPUnit(ParallelMixin):
    """The module of a unit, or one below it with parameters that the unit holds.

    Both its call, since hooks may use parameters, and its forward, which may be called directly, go through the unit;
    not those of a module below it, while it runs.
    """

    keeps_name: ClassVar[bool] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its parameters gathered, but not as the first unit that FSDP2 sees."""
        if torch.compiler.is_compiling() or ((unit := self.__dict__[UNIT])._inside and self is not unit.module):
            return super().__call__(*args, **kwargs)
        return unit.call(self, super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward; called directly, with what FSDP2 does around a call."""
        if torch.compiler.is_compiling() or ((unit := self.__dict__[UNIT])._inside and self is not unit.module):
            return super().forward(*args, **kwargs)
        return unit.run_forward(self, super().forward, args, kwargs)

    def _as_unit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # FSDP2 puts its own around this method of the unit's module, see `FSDPUnit.watch`.
        return function(*args, **kwargs)


def require_known_fsdp() -> None:
    """Raise `NotSupportedError` if the FSDP2 of this torch keeps its state otherwise than `FSDPUnit` knows."""
    otherwise = "pass wrap=False and apply fully_shard yourself."
    if gone := missing(DATA_PARALLEL):
        raise NotSupportedError(f"{complaint(gone)}, or {otherwise}")
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    if getattr(FSDPState()._training_state, "name", None) != "IDLE":
        raise NotSupportedError(
            f"the FSDP2 of torch {torch.__version__} keeps its state in another way than shardcore knows, so that "
            "calls of parts of a model could not be made right. Use a version of torch that shardcore was tested "
            f"with ({' to '.join(TESTED)}), or {otherwise}"
        )


def prepare_units(model: nn.Module, blocks: list[nn.Module], *, meet: Meet | None = None) -> list[FSDPUnit]:
    """Turn ``model``, its ``blocks`` and all other modules with parameters into modules of units, in place.

    FSDP2 will be applied to the model last. ``meet`` is called before something may be sent for a unit.

    Returns:
        the units, that of the model last: `FSDPUnit.watch` each as soon as FSDP2 was applied to its module.
    """
    root = FSDPUnit(model, meet=meet)
    units = [*(FSDPUnit(block, root, meet=meet) for block in blocks), root]
    owned: set[nn.Module] = set()
    for unit in units:
        for module in _own(unit.module, owned):
            add_mixin(module, InFSDPUnit)
            module.__dict__[UNIT] = unit
        owned.update(unit.module.modules())
    return units


def _own(top: nn.Module, owned: set[nn.Module]) -> list[nn.Module]:
    """Return ``top`` and the modules below it that can be called and have parameters which no other unit owns."""
    if top in owned:
        return []
    others = {p for module in owned for p in module._parameters.values()}
    return [top] + [
        module
        for module in top.modules()
        if module is not top
        and module not in owned
        and type(module).forward is not nn.Module.forward
        and any(p not in others for p in module.parameters())
    ]


def unit_of(module: nn.Module) -> FSDPUnit | None:
    """Return the unit that holds the parameters of ``module``; None where FSDP2 was not applied by shardcore."""
    return module.__dict__.get(UNIT)


def parameter_groups(state: Any) -> list[Any]:
    """Return the parameters that a unit gathers at once, in one group or, since torch 2.12, in several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
