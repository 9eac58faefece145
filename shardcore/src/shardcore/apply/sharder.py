"""Sharding one model: compile, agree, prepare, agree again, and only then change it.

Everything that can fail is prepared first (the parts of every parameter, the modules that a user's classes make), so
that a failure on any rank is an error on all of them with nothing changed; the changes are assignments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardcore.agree.agreement import Report, agreement, is_alone
from shardcore.agree.fingerprint import Item, in_words, model_items, tensor_items, training_modes, versions
from shardcore.agree.received import check_source, receive
from shardcore.apply.call_checks import compare_calls, follow_seeds
from shardcore.apply.changes import prepared
from shardcore.apply.errors import out_of_inference_mode, together
from shardcore.apply.launch import world_size
from shardcore.apply.shardable import check_model, refuse_packed, refuse_sharded
from shardcore.clients import changes_of_libraries, policy_base
from shardcore.compile import compile_plan, policy_of
from shardcore.compile.parts import policy_at
from shardcore.config import ShardConfig
from shardcore.config.pipelining import SPLIT_SCHEDULES
from shardcore.errors import ConfigError, PartlyShardedError
from shardcore.mesh.context import ShardContext, set_alone, set_context, set_part_of
from shardcore.nn.intact import Intact
from shardcore.nn.loading import take_full_tensors
from shardcore.nn.partial import require_sums
from shardcore.nn.process import watch_torch
from shardcore.nn.root import ShardedModel, check_gradients
from shardcore.plan import ShardPlan
from shardcore.plan.digest import to_data
from shardcore.plan.shard_plan import ModelPhase
from shardcore.plan.steps.base import Commit
from shardcore.plugins.registry import Registry, default_registry
from shardcore.policy import Policy


class ModelSharder:
    """Shards one model by one policy, in place.

    ```python
    ModelSharder(model, policy, ShardConfig(tensor_parallel_size=2)).shard()
    ```

    Every rank of the default process group makes the same call. Most users call `shardcore.shard`, which finds the
    policy, starts the process group and adds data parallelism. After Shardformer's ``ModelSharder`` (ColossalAI).

    Args:
        model: the unsharded model, with the same weights on every rank (or on the meta device).
        policy: a policy, its class, or one as data; None looks for one among the installed packs.
        shard_config: the configuration. It and ``policy`` may come in either order, as both were published.
        sync_from: take the weights of this global rank instead of requiring equal ones.
        phases: what is done to the model besides, in this order.

    Raises:
        ConfigError: an argument is of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | type[Policy] | Mapping[str, Any] | ShardConfig | None = None,
        shard_config: ShardConfig | Policy | type[Policy] | Mapping[str, Any] | None = None,
        *,
        sync_from: int | None = None,
        phases: Sequence[ModelPhase] = (),
    ) -> None:
        config: Any = shard_config
        if isinstance(policy, ShardConfig) or not isinstance(shard_config, ShardConfig | None):
            policy, config = config, policy
        check_model(model)
        if isinstance(policy, Mapping):
            policy = policy_of(policy, policy_base(model))
        if isinstance(policy, type) and issubclass(policy, Policy):
            policy = _made(policy)
        if not isinstance(policy, Policy | None) or not isinstance(config, ShardConfig | None):
            raise ConfigError(
                f"ModelSharder wants a model, a Policy and a ShardConfig, got {type(policy).__name__} and "
                f"{type(config).__name__}; shardcore.shard(model, tp=...) finds the policy by itself"
            )
        if sync_from is not None and (type(sync_from) is not int or sync_from < 0):
            raise ConfigError(f"sync_from must be the number of a global rank, from 0, or None; got {sync_from!r}")
        self.model = model
        self.config = config or ShardConfig()
        self.plan: ShardPlan | None = None
        self.context: ShardContext | None = None
        self._policy = policy
        self._origin = ""
        self._registry: Registry | None = None  # where the policy was found; None for one that was given
        self._sync_from = sync_from
        self._phases = phases

    @functools.cached_property
    def group(self) -> ProcessGroup | None:
        """The ranks that shard the model together; None for the default process group."""
        return self.config.group()

    @property
    def policy(self) -> Policy:
        """The policy: the one given, or the one that an installed pack offers for the model's class.

        Raises:
            NoPolicyError: no installed pack serves the class.
            AmbiguousPolicyError: several do.
        """
        if self._policy is None:
            registry = default_registry()
            self._policy, self._origin = registry.policy_for(type(self.model))
            self._registry = registry
        return self._policy

    def compile(self) -> ShardPlan:
        """Compile the plan; changes nothing.

        Raises:
            AlreadyShardedError: the model, or a part of it, was sharded before.
            NotSupportedError: it is quantized.
            ConfigError: the sizes do not fit the number of ranks.
            PlanError: the policy does not fit the model.
        """
        refuse_sharded(self.model)
        refuse_packed(self.model)
        plan = self._compile(self.config.resolve(world_size(self.config)))
        for phase in self._phases:
            phase.check(plan)
        return plan

    def shard(self) -> nn.Module:
        """Shard the model in place and return it.

        Raises:
            ShardcoreError: before anything was changed, on every rank, if any rank could not go on or the ranks differ.
            PartlyShardedError: the code of the policy or of a pack failed while the model was being changed.
        """
        with out_of_inference_mode():
            for phase in self._phases:
                phase.begin()
            try:
                context = self.agree()
                self._observe("before")
                self._apply(context)
                self._observe("after")
            except BaseException:
                for phase in self._phases:
                    phase.give_up()  # as it was, unless it is broken
                raise
            assert self.plan is not None  # they have agreed on one
            for phase in self._phases:
                if phase.runs(context):
                    with self._together(changing=True):
                        phase.apply(context, self.plan)
        return self.model

    def _apply(self, context: ShardContext | None) -> None:
        if context is None:
            for commit in self._prepared(None):
                commit()
            set_alone(self.model)
            return
        preprocesses = any(type(policy).preprocess is not Policy.preprocess for policy in self._policies)
        if preprocesses:
            with self._together(changing=True):
                for policy in self._policies:
                    self._run_users_code(policy.preprocess)
                if self.plan is not None:
                    self.plan = self._compile(self.plan.config)  # for what the model has become
        with self._together(changing=preprocesses):
            commits = self._prepared(context)
        with self._together(changing=True):
            self._change(context, commits)

    def _observe(self, when: Literal["before", "after"]) -> None:
        """Call the observing hooks of the packs; a policy that was given bypasses them, like all of discovery."""
        if self._registry is not None and self._registry.observes(when):  # alike on all ranks: they have agreed on it
            with self._together(changing=when == "after"):
                self._registry.observe(when, self.model, self.plan)

    def agree(self) -> ShardContext | None:
        """Compile, and make sure that all ranks hold the same; returns None where there is nothing to shard."""
        with agreement(group=self.group) as own:
            self.plan = self.compile()
            if self._sync_from is not None:
                check_source(self.model, self._sync_from, self.group)
            items = () if is_alone(self.group) else self._items(self.plan)
            own.report = Report(items=tuple(items), seed=torch.initial_seed())
        if world_size(self.config) == 1 or self.plan is None:
            return None
        config = self.plan.config
        splits = config.pipeline_schedule in SPLIT_SCHEDULES
        if self._sync_from is not None:
            receive(self.model, self._sync_from, self.group)
        self.context = ShardContext.of(
            config.mesh(),
            seed=own.reports[0].seed,
            # A backward that is split computes gradients of parameters in an order that ranks do not share.
            partial_gradients="deferred" if splits else config.partial_gradients,
            keeps_gathered=config.sequence_keep_gathered,
            overlap=config.enable_sequence_overlap,
            fuses_regions=not splits,
            fp8=config.fp8_communication,
            experts=config.expert_mesh(),
            parameters=config.parameter_mesh(),
            origin=self._origin,
        )
        return self.context

    def _items(self, plan: ShardPlan) -> Iterator[Item]:
        """Yield everything that ranks have to hold alike, so that the first difference explains the others."""
        model_class, *others = model_items(self.model)
        yield model_class
        yield "the policy's origin", f"{plan.policy} of {self._origin or 'no pack'}"
        for part in plan.parts:
            yield f"the policy of {part.path}", f"{part.policy} of {part.origin or 'no pack'}"
        models = [self.model, *(self.model.get_submodule(part.path) for part in plan.parts)]
        yield from dict.fromkeys(item for model in models for item in versions(model))
        packs = self._registry.active if self._registry else ()
        yield "the packs that bring modules or observe", ", ".join(map(str, packs)) or "none"
        yield from ((f"ShardConfig.{name}", str(value)) for name, value in to_data(plan.config).items())
        yield "the argument sync_from", str(self._sync_from)
        for phase in self._phases:
            yield from phase.items()
        yield from others
        if self._sync_from is None:
            yield from training_modes(self.model)
        about, values = tensor_items(self.model, values=self._sync_from is None)
        yield from about
        yield from in_words(plan)
        yield from values

    def replace_model_class(self) -> None:
        """Swap the class of this one model for the one that the policy provides, and mark the model as sharded."""
        if self.context is None:
            return
        self._give_class(self.model, self.policy, "new_model_class")
        for path, part in [(path, module) for path, module in self.model.named_modules() if path]:
            policy = policy_at(self.policy, path)
            given = (policy, "new_model_class") if path in self.policy.parts else (policy, "new_part_class", part)
            if self._give_class(part, *given):
                set_part_of(part, self.context)
        set_context(self.model, self.context)
        if self.context.partial_gradients == "deferred":
            require_sums(self.model)

    def _give_class(self, module: nn.Module, policy: Policy, method: str, *arguments: nn.Module) -> bool:
        new: type[nn.Module] | None = getattr(policy, method)(*arguments)
        if new is None:
            return False
        if not issubclass(new, type(module)):
            raise PartlyShardedError(
                f"{type(policy).__name__}.{method} returned {new.__qualname__}, which is not a subclass of "
                f"{type(module).__qualname__}; derive it from that class"
            )
        module.__class__ = new
        return True

    def replace_module(self) -> None:
        """Replace parameters, modules, attributes and methods as the plan says.

        `shard` calls it between the agreement and the post-processing; call it alone only after `agree`.
        """
        if (context := self.context or self.agree()) is not None:
            with self._together():
                commits = self._prepared(context)
            for commit in commits:
                commit()

    @property
    def _policies(self) -> list[Policy]:
        """The policies of all parts, those of inner ones before those of the modules around them."""
        return [*list(self.policy.parts.values())[::-1], self.policy]

    def _compile(self, config: ShardConfig) -> ShardPlan:
        policy = self.policy  # which finds the registry too
        modules = self._registry.modules_for(config) if self._registry else None
        return compile_plan(
            policy,
            self.model,
            config,
            origin=self._origin,
            modules=modules,
            delegates=lambda cls: default_registry().policy_for(cls),  # of a policy that was given too
        )

    def _prepared(self, context: ShardContext | None) -> list[Commit]:
        return [] if self.plan is None else prepared(self.model, self.plan, context)

    def _change(self, context: ShardContext, commits: Sequence[Commit]) -> None:
        """Make the model a sharded one: all that it becomes, but for what phases do to it."""
        self.replace_model_class()
        for commit in commits:
            commit()
        # Around whatever the plan makes of the model itself: that draws from the model's random stream too.
        ShardedModel.swap_class(self.model, context)
        take_full_tensors(self.model)
        watch_torch(self.model, *changes_of_libraries())
        for policy in self._policies:
            self._run_users_code(policy.postprocess)
        # Which modules have to stay: whoever changes them later is told in the next call of the model.
        steps = self.plan.steps if self.plan else ()
        regions = {step.path for step in steps if step.splits_heads}
        tokens = [path for step in steps for path in step.splits_tokens]
        replicas = context.sizes.replicas * context.sizes.cp
        self.model.__dict__["_shard_intact"] = Intact(self.model, sorted(regions), tokens, replicas)
        follow_seeds(context)
        # Which parameters may be frozen by a pack's policy, its kit has checked.
        check_gradients(self.model, whatever_is_trained=self._registry is None)
        if context.sizes.pp == 1:  # a pipeline compares the whole batch, in each step
            compare_calls(self.model, context, self.config.check_inputs_every)

    def _together(self, *, changing: bool = False) -> AbstractContextManager[None]:
        """Raise on all ranks if what is done inside fails on one."""
        return together(self.model, group=self.group, changing=changing)

    def _run_users_code(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            raise PartlyShardedError(
                f"{type(getattr(function, '__self__', self.policy)).__name__}."
                f"{getattr(function, '__name__', function)} failed while the "
                f"{type(self.model).__name__} was being sharded: {type(error).__name__}: {error}. The model is "
                "unusable; build it anew."
            ) from error


def _made(policy: type[Policy]) -> Policy:
    try:
        return policy()
    except Exception as error:
        raise ConfigError(
            f"policy={policy.__name__} could not be instantiated: {type(error).__name__}: {error}; a policy class "
            "takes no arguments and implements module_policy. Pass an instance if it needs arguments"
        ) from error
