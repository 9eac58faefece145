"""One case at one tensor-parallel size: its models, inputs and policy, as the checks need them."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import operator
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import importlib_metadata
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardcore
from shardcore.comm import norms, strided
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError, PlanError
from shardcore.mesh.axes import current_device, device_type_of
from shardcore.nn.context.shard import divided_attention
from shardcore.nn.copies import meta_copy
from shardcore.plan import ShardPlan
from shardcore.plugins.registry import GROUP, Registry, default_registry
from shardcore.policy import Policy
from shardcore_testing.cases import Case

__all__ = [
    "Subject",
    "adamw",
    "cases_of",
    "checkpointing",
    "flat",
    "meta_copy",
    "prompt_of",
    "registry_of",
    "torch_lacks",
]

Value = TypeVar("Value")


@cache
def registry_of(plugin: str) -> Registry:
    """Return the registry of one plugin that need not be installed, or of what is installed for ``""``."""
    if not plugin:
        return default_registry()
    entry = importlib_metadata.EntryPoint(name=plugin.partition(".")[0], value=plugin, group=GROUP)
    registry = Registry.discover([entry])
    if (error := registry.packs[0].error) is not None:
        raise error
    return registry


def cases_of(functions: tuple[str, ...]) -> list[Case]:
    """Return the cases of a pack, from the names of its functions.

    Raises:
        ConfigError: a function returns something else.
    """
    found: list[Case] = []
    for reference in functions:
        module, _, name = reference.partition(":")
        cases = operator.attrgetter(name)(importlib.import_module(module))()
        if not isinstance(cases, list | tuple) or not all(isinstance(case, Case) for case in cases):
            raise ConfigError(f"{reference} returned {cases!r}; wanted a list of shardcore_testing.Case")
        found += cases
    return found


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One case at one size.

    Attributes:
        case: the case.
        tp: the number of tensor-parallel ranks.
        dp: the number of replicas, each of ``tp`` ranks.
        plugin: the module of a pack that need not be installed; ``""`` for what is installed.
        steps: how many steps of an optimizer are compared; with none, the gradients alone.
        options: options of ``build`` that differ from their defaults.
        fields: of the configuration that it is sharded with.
    """

    case: Case
    tp: int
    dp: int = 1
    plugin: str = ""
    steps: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a case that cannot be sent to the ranks.

        Raises:
            ConfigError: it has a lambda, or a function inside of another one.
        """
        for about in dataclasses.fields(self.case):
            value = getattr(self.case, about.name)
            try:
                pickle.dumps(value)
            except Exception as error:  # nearly any
                raise ConfigError(
                    f"the case {self.case.name!r} has {about.name}={value!r}, which cannot be sent to the ranks "
                    f"({type(error).__name__}: {error}). Write it as a function at the top level of a module"
                ) from error

    def __str__(self) -> str:
        replicas = f" x dp {self.dp}" if self.dp > 1 else ""
        return f"{self.case.name} at tp {self.tp}{replicas}"

    @property
    def device(self) -> torch.device:
        """Where this rank computes: where tensors of the default process group live."""
        return current_device(device_type_of() if dist.is_initialized() else "cpu")

    @property
    def rank(self) -> int:
        """The rank that this process is."""
        return dist.get_rank() if dist.is_initialized() else 0

    def build(self, **options: Any) -> Any:
        """Return the unsharded model in float64 and in training mode, whatever its parameters need."""
        model = self.case.build(**{**self.options, **options}).to(torch.float64).train()
        # While a recipe is recorded, it has no values.
        return model if any(p.is_meta for p in model.parameters()) else model.to(self.device)

    def policy(self, model: nn.Module) -> Policy | None:
        """Return the policy to be given to ``shard``; None if an installed pack is to be found."""
        given = self.case.policy
        if isinstance(given, str):
            module, _, name = given.partition(":")
            given = operator.attrgetter(name)(importlib.import_module(module))
        if given is None and self.plugin:
            given = registry_of(self.plugin).resolve(type(model)).load()
        return None if given is None else given()

    def shard(self, model: Any, **fields: Any) -> Any:
        """Shard ``model`` over all ranks."""
        given = {"tp": self.tp, **({"dp": self.dp} if self.dp > 1 else {}), **self.fields, **fields}
        return shardcore.shard(model, policy=self.policy(model), **given)

    def twins(self, **options: Any) -> tuple[Any, Any]:
        """Return an unsharded model and its sharded copy."""
        reference = self.build(**options)
        return reference, self.shard(copy.deepcopy(reference))

    def plan(
        self, model: nn.Module, tp: int | None = None, *, device_type: str | None = None, **fields: Any
    ) -> ShardPlan:
        """Compile the plan of ``model``."""
        policy = self.policy(model)
        modules = None
        config = ShardConfig.of(tp=tp or self.tp, **{**self.fields, **fields})
        if policy is None:
            registry = default_registry()
            policy = registry.resolve(type(model)).load()()
            modules = registry.modules_for(config.resolve(config.ranks))
        return compile_plan(policy, model, config, modules=modules, delegates=_delegates, device_type=device_type)

    def inputs(self, model: Any, seed: int = 0) -> dict[str, Any]:
        """Return the arguments of one call, on this rank's device, and in float64 where they are not integers."""

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(self.device, torch.float64 if value.is_floating_point() else None)

        inputs: dict[str, Any] = tree_map(placed, self.case.inputs(model, seed))
        return inputs

    def prompt(self, model: Any) -> dict[str, Any]:
        """Return the arguments of a generation."""
        return prompt_of(self.inputs(model))

    def loss(self, out: Any) -> Tensor:
        """Return the loss of a model's output.

        Raises:
            AssertionError: there is none.
        """
        named = self.case.loss
        loss = named(out) if callable(named) else _item(out, named)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise AssertionError(f"the case's loss {named!r} is no single number in a {type(out).__name__}")
        return loss

    def blocks(self, model: nn.Module, plan: ShardPlan) -> str:
        """Return the name of the list of blocks; empty if nobody says."""
        return self.case.layers or next(iter(plan.stages.lists if plan.stages else ()), "")

    def lacks_context(self) -> str | None:
        """Say what the installed library of the model lacks for context parallelism, or None."""
        library = divided_attention(self.build())
        return None if library is None else library.lacks()

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all ranks."""
        found: list[Any] = [None] * self.tp * self.dp
        dist.all_gather_object(found, value)
        return found


def prompt_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that a generation takes: tensors, but no labels and nothing for one half alone."""
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and not name.endswith("labels") and "coder" not in name
    }


def _item(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def torch_lacks(error: PlanError) -> str | None:
    """Return what the installed torch lacks of what a plan needs, if that is why there is none."""
    return next((p.what for p in error.problems if p.what in (strided.torch_lacks(), norms.torch_lacks())), None)


def adamw(model: nn.Module, *, foreach: bool | None = None) -> torch.optim.Optimizer:
    """Return the optimizer whose steps are compared.

    Its eps lies far above rounding errors. Otherwise a parameter without a true gradient (a key bias) moves by nothing
    but them: as far as any other, and in another direction wherever a softmax in float32 rounds otherwise.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4, foreach=foreach)


def checkpointing(model: Any, kind: dict[str, Any] | None) -> None:
    """Turn gradient checkpointing on, or off with None, by the name that the model has for it.

    Raises:
        AttributeError: it has none.
    """
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if kind is None:
        getattr(model, f"{prefix}_checkpointing_disable")()
    else:
        getattr(model, f"{prefix}_checkpointing_enable")(kind)


def flat(out: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's output with their names; caches are left out."""
    if isinstance(out, Tensor):
        yield prefix or "output", out
    elif isinstance(out, Mapping):
        for name, value in out.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(out, list | tuple):
        for index, value in enumerate(out):
            yield from flat(value, f"{prefix}[{index}]")


def _delegates(cls: type[nn.Module]) -> tuple[Any, str]:
    return default_registry().policy_for(cls)  # discovered only where something is delegated
