"""Base classes: `ParallelModule`, and `ParallelMixin` for those that are the native object with a further mixin."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardcore.errors import WrapError
from shardcore.mesh.context import ShardContext, as_context
from shardcore.nn.costs import Collective, Site
from shardcore.nn.layout import Layout, distribute
from shardcore.nn.living import is_living
from shardcore.nn.loading import take_full_tensors
from shardcore.nn.mixin import add_mixin, is_generated, mixins, name_in_tracebacks, native_class, once, sharded_class
from shardcore.nn.process import watch_torch
from shardcore.nn.sequence.shard import SequenceShard

#: On a module: what was compiled of its forward. It cannot be pickled, and is made again when it is missing.
COMPILED = "_shard_compiled"

#: What to do instead of pickling, for every object that refuses it.
NO_PICKLE = (
    "a sharded model cannot be pickled: its parameters live on several ranks. Save it with "
    "model.save_pretrained(folder) or torch.distributed.checkpoint.save(model.state_dict(), ...), or get one plain "
    "state dict from torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)); copy.deepcopy(model) works without data parallelism."
)


class ParallelModule(nn.Module):
    """A module that replaces a native one and computes the same over several ranks.

    To write one, subclass it and implement `from_native_module`. Outside of regions it is given and returns full
    tensors, as the native module is; inside of a region, this rank's part of them. The parameters that it makes may be
    plain local tensors: the sharder turns them into DTensors by comparing their shapes with the native ones.

    After Shardformer's ``ParallelModule`` (ColossalAI).
    """

    @staticmethod
    @abstractmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup | list[ProcessGroup] | None = None, **kwargs: Any
    ) -> nn.Module:
        """Return the parallel form of ``module`` on the ranks of ``process_group``; None is the default group."""
        raise NotImplementedError


class ParallelMixin(ParallelModule):
    """A parallel module that is the native object itself, with a further mixin.

    The object gets a generated class, whose bases are all of its mixins and then its native class
    (`shardcore.nn.mixin`). So ``isinstance``, hooks, attributes, buffers and the module's place in the model stay.
    A subclass gives the layouts of the parameters (`layouts`), sets attributes (`swap_class`), and computes around
    ``super().forward``.
    """

    #: Native classes that this module can replace.
    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)
    #: Whether the swapped class keeps the native ``__name__`` (needed wherever a library goes by class names).
    keeps_name: ClassVar[bool] = False

    #: Whether a native class with a forward of its own keeps running it, and finds that of this class, not of one
    #: derived from it, by ``super().forward``.
    plan_serves_super: ClassVar[bool] = False

    #: Whether one rank alone on ``tp`` has no use for it.
    plan_needs_tp: ClassVar[bool] = True

    #: Whether it sums its output over the ranks, so that a region ends there.
    plan_sums_output: ClassVar[bool] = False

    #: Whether it asks the ranks of ``cp`` for their tokens, so that the library's attention need not.
    plan_attends: ClassVar[bool] = False

    #: The outputs that the module captures from its layers, and that it gathers: "attentions", "hidden_states".
    plan_gathers: ClassVar[tuple[str, ...]] = ()

    #: Options that a module keeps as they are -> the attribute that has them.
    kept_options: ClassVar[Mapping[str, str]] = {}

    #: The names of the options that `layouts` and `swap_class` understand.
    option_names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.option_names = cls.option_names.union(cls.kept_options)
        name_in_tracebacks(cls)

    @classmethod
    def refusal(cls, module: nn.Module, ranks: int, **options: Any) -> str | None:
        """Say why ``module`` cannot be replaced with these options on that many ranks, or return None if it can."""
        if unknown := sorted(options.keys() - cls.option_names):
            known = ", ".join(sorted(cls.option_names)) or "none"
            return f"{cls.__name__} does not understand {', '.join(unknown)}; its options are {known}"
        if "forward" in vars(module):
            return (
                f"this {type(module).__name__} has a forward of its own on the instance, which would be called, not "
                "the parallel one; set it on a subclass, or after shard()"
            )
        try:
            return cls.problem(module, ranks, **options)
        except TypeError as error:  # values of the wrong kind
            return f"{cls.__name__} does not understand its options {options}: {error}"

    @classmethod
    def plan_kind_problem(cls, module: nn.Module) -> str | None:
        """Say why this class replaces no module like ``module``, whatever its sizes, or return None if it does."""
        if not isinstance(module, cls.native_classes):
            wanted = " or ".join(f"{c.__module__}.{c.__qualname__}" for c in cls.native_classes)
            return f"{cls.__name__} replaces {wanted}, got {type(module).__module__}.{type(module).__qualname__}"
        return None

    @classmethod
    def problem(cls, module: nn.Module, ranks: int, **options: Any) -> str | None:
        """Say why ``module`` cannot be replaced on that many ranks, or return None if it can."""
        return cls.plan_kind_problem(module)

    @classmethod
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        """Return the layout of each of the module's own parameters, by name, for that many ranks."""
        return {}

    @classmethod
    def plan_enters(cls, **options: Any) -> bool:
        """Tell whether each call of the module enters a region by itself, which no other module shares."""
        return False

    @classmethod
    def plan_sums_gradients(cls, **options: Any) -> bool:
        """Tell whether the gradients of its parameters are right where activations are split (inside a region)."""
        return True

    @classmethod
    def plan_on_split_tokens(cls, **options: Any) -> str | None:
        """Say why the module cannot work on activations that are split along the sequence, or return None."""
        return None

    @classmethod
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        """Yield what one forward and backward of the module send; ``site`` is its place in the plan."""
        return iter(())

    #: How the activations that it sees, or those around it, are split along the sequence; None if they never are.
    _shard_sequence: SequenceShard | None = None

    def _take_sequence(self, tokens: SequenceShard | None) -> None:
        """Set how activations are split along the sequence; called once, after `swap_class`."""
        self.__dict__["_shard_sequence"] = tokens

    @classmethod
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        """Swap the class of ``module`` for one with this mixin, and return the same object.

        Its parameters are DTensors already. Precondition: `problem` returned None.
        """
        add_mixin(module, cls)
        kept = {name: options[option] for option, name in cls.kept_options.items() if option in options}
        if context is not None:  # which one rank alone has not; steps that split nothing are carried out there
            kept["_shard_context"] = context
        module.__dict__.update(kept)
        return cast("Self", module)

    @classmethod
    def from_native_module(
        cls,
        module: nn.Module,
        process_group: ProcessGroup | list[ProcessGroup] | DeviceMesh | ShardContext | None = None,
        **options: Any,
    ) -> Self:
        """Replace ``module`` in place and return it.

        Args:
            module: the native module; every rank must hold the same weights.
            process_group: the tensor-parallel ranks, as a process group or a one-dimensional mesh; None is the default
                process group.
            **options: of the subclass.

        Raises:
            TypeError: the native module is of a class that this one cannot replace, or an option is unknown.
            ValueError: its sizes cannot be split over that many ranks.
            ConfigError: no process group was given, and there is no default one.
        """
        context = as_context(process_group)
        if problem := cls.refusal(module, context.size, **options):
            known = cls.plan_kind_problem(module) is None and options.keys() <= cls.option_names
            raise (ValueError if known else TypeError)(problem)
        for name, layout in cls.layouts(module, context.size, **options).items():
            parameter = module._parameters[name]
            if parameter is not None:
                module._parameters[name] = distribute(parameter, layout, context)
        new = cls.swap_class(module, context, **options)
        take_full_tensors(new)
        watch_torch(new)
        return new

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for parameter in self._parameters.values():
            # torch puts a new tensor into a DTensor parameter, also where nothing moves, and only the parameter's list
            # of hooks stays. Those that average its gradient over replicas have to run on: this gives it the list.
            if parameter is not None and parameter._backward_hooks:
                parameter._backward_hooks = parameter._backward_hooks
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        context: ShardContext | None = self.__dict__.get("_shard_context")
        if context is not None:
            # A copy runs on the same ranks; modules of users hold the group too, and it cannot be copied.
            memo[id(context.group)] = context.group
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if is_living(self):
            watch_torch(new)
        return new

    def __copy__(self) -> Self:
        own = self.__dict__
        if (refuses := own.get("__deepcopy__")) is not None:  # FSDP2 knows its modules by their identity
            refuses({})
        new = type(self).__new__(type(self))
        new.__dict__.update(own)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WrapError(NO_PICKLE)


class LocalModule(ParallelMixin):
    """A swapped module that splits nothing over ranks; in a model on one rank it can be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = mixins(self)
        local = all(issubclass(mixin, LocalModule) for mixin in own)
        # A class that somebody has put on top of the generated one cannot be made again from a list.
        if "_shard_context" in self.__dict__ or not local or not is_generated(type(self)):
            return super().__reduce_ex__(protocol)
        state = {name: value for name, value in self.__dict__.items() if name != COMPILED}
        return _restored, (native_class(type(self)), own), state


def _restored(native: type[nn.Module], own: tuple[type[nn.Module], ...]) -> nn.Module:
    cls = sharded_class(native, own)
    return cls.__new__(cls)


class ReplacedMethods(ParallelMixin):
    """Methods of a user in place of the native ones."""

    keeps_name: ClassVar[bool] = True
    replaces_forward: ClassVar[bool] = True


@once
def _replaced(methods: tuple[tuple[str, Callable[..., Any]], ...]) -> type[nn.Module]:
    return type("ReplacedMethods", (ReplacedMethods,), dict(methods))


def with_methods(module: nn.Module, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Give one instance other methods; other instances of its class are not affected.

    They are a mixin, not attributes of the instance, so that libraries which wrap ``forward`` in
    ``__init_subclass__`` (for gradient checkpointing) wrap the new one too.
    """
    add_mixin(module, _replaced(tuple(sorted(methods.items()))))
