"""Compiling a policy against one model and one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardcore.compile.builder import Modules, Part, PlanBuilder, RuleScope, matches
from shardcore.compile.checks import check_stages, refuse_captured, report_tensors
from shardcore.compile.data_policy import policy_of
from shardcore.compile.parts import Delegates, PartFinder, joined_stages
from shardcore.compile.switches import optimize
from shardcore.config import ShardConfig
from shardcore.mesh.axes import device_type_here
from shardcore.plan import ParameterPlan, PartPlan, ShardPlan, Stages
from shardcore.plan.steps.base import ParameterClaim
from shardcore.plan.steps.modules import ScopeRandomness
from shardcore.policy import Heads, Policy


def compile_plan(
    policy: Policy | type[Policy] | Mapping[str, Any],
    model: nn.Module,
    config: ShardConfig,
    *,
    origin: str = "",
    device_type: str | None = None,
    modules: Modules | None = None,
    delegates: Delegates | None = None,
) -> ShardPlan:
    """Compile ``policy`` against ``model``; nothing is changed, and the model may be on the meta device.

    Args:
        policy: a policy, its class, or what `DataPolicy` makes one of.
        model: the unsharded model.
        config: the configuration; sizes that are None are derived for as many ranks as it names.
        origin: the distribution and version that the policy comes from.
        device_type: where the model will run, ``"cuda"`` or ``"cpu"``; by default where `shardcore.shard` would.
        modules: what packs bring in place of parallel modules (`shardcore.Registry.modules_for`).
        delegates: finds the policies of submodules that rules delegate without one (`shardcore.Registry.policy_for`).

    Raises:
        NoPolicyError: no pack serves a delegated submodule.
        PlanError: the policy does not fit; carries every problem.
    """
    if isinstance(policy, Mapping):
        policy = policy_of(policy)
    policy = policy() if isinstance(policy, type) else policy
    config = config.resolve(config.ranks)
    builder = PlanBuilder(model, config, config.tensor_parallel_size or 1, modules=modules)
    parts = PartFinder(builder, delegates, policy.parts).find(policy, origin)
    for part in parts:
        _check_heads(builder, part)
    _plan_rules(builder, policy, parts)
    builder.check()
    refuse_captured(builder)
    report_tensors(builder)
    stages = check_stages(builder, policy, joined_stages(builder, parts))
    for path in stages.around if stages and config.ranks > 1 else ():
        builder.add_late(ScopeRandomness(path=path))
    choices = optimize(builder, policy, stages, device_type or device_type_here())
    parameters = _parameters(builder, stages)
    if builder.problems:
        raise builder.failure(policy, builder.problems)
    return ShardPlan(
        model=_full_name(model),
        policy=_full_name(policy),
        origin=origin,
        config=config,
        parameters=parameters,
        # In the order in which they build on each other, and within a phase in that of the policy.
        steps=tuple(sorted(builder.carried_out, key=lambda step: step.phase)),
        stages=stages,
        choices=choices,
        parts=tuple(
            PartPlan(path=p.path, model=_full_name(p.module), policy=_full_name(p.policy), origin=p.origin)
            for p in parts[1:]
        ),
    )


def _full_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _check_heads(builder: PlanBuilder, part: Part) -> None:
    """Ask the policy's checks, which know the numbers of heads that rules go by."""
    rule = f"{type(part.policy).__qualname__}.checks"
    for check in part.policy.checks:
        if problem := check.problem(part.module, builder.ranks):
            builder.report(where=part.path, rule=rule, what=problem[0], todo=problem[1])
        if isinstance(check, Heads):
            part.heads[check.of] = None if problem else check.counts(part.module, builder.ranks)


def _plan_rules(builder: PlanBuilder, policy: Policy, parts: Sequence[Part]) -> None:
    """Let every rule of every part plan, at every module of its class there."""
    checked = list(builder.problems)
    modules = list(builder.model.named_modules())
    for part in parts:
        _plan_part(builder, part, [(path, module) for path, module in modules if part.holds(path)])
    if builder.refusals:
        raise builder.failure(policy, [*checked, *builder.refusals])


def _plan_part(builder: PlanBuilder, part: Part, modules: Sequence[tuple[str, nn.Module]]) -> None:
    for key, rules in part.rules.items():
        matching = [(path, module) for path, module in modules if matches(module, key)]
        if not matching and not all(rule.optional for rule in rules):
            name = key if isinstance(key, str) else getattr(key, "__qualname__", str(key))
            kinds = sorted({type(module).__name__ for _, module in modules})
            builder.report(
                where=part.path,
                rule=f"{name!r}: [{', '.join(rule.text for rule in rules)}]",
                what=f"no module of class {name!r}; the model has {', '.join(kinds)}",
                todo="correct the class name for this version of the model, or make the rules optional=True",
            )
        for rule in rules:
            for path, module in matching:
                rule.plan(RuleScope(builder, part, rule, path, module))


def _parameters(builder: PlanBuilder, stages: Stages | None) -> tuple[ParameterPlan, ...]:
    """Account for every parameter: claimed under each of its names, once, with one layout."""
    names: dict[int, list[str]] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, parameter in builder.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        by_id[id(parameter)] = parameter
    plans = []
    for key, parameter in by_id.items():
        first, *aliases = names[key]
        places = list(dict.fromkeys(_first_name(builder, name) for name in names[key]))
        # The first claim of each place: more than one is a problem of its own.
        claims = [claim for name in places for claim in builder.claims.get(name, ())[:1]]
        _check_claims(builder, places, claims)
        if builder.ranks > 1 and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            builder.report(
                where=first,
                what="the parameter has gradient hooks, which would stay with the whole tensor that is replaced",
                todo="register them after shard(), for gradients that are DTensors",
            )
        plans.append(
            ParameterPlan(
                name=first,
                aliases=tuple(aliases),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype),
                layout=claims[0].layout if claims else None,
                held_by=tuple(dict.fromkeys(filter(None, map(stages.holder, names[key])))) if stages else (),
            )
        )
    return tuple(plans)


def _first_name(builder: PlanBuilder, name: str) -> str:
    """Return the name of a parameter in its module's first place."""
    owner, _, short = name.rpartition(".")
    return ".".join(filter(None, (builder.paths[id(builder.named[owner])], short)))


def _check_claims(builder: PlanBuilder, names: Sequence[str], claims: Sequence[ParameterClaim]) -> None:
    for name in names:
        own = builder.claims.get(name, [])
        if not own:
            builder.report(
                where=name,
                what=f"the parameter {tuple(builder.model.get_parameter(name).shape)} is covered by no rule",
                todo="add a rule for it: region, vocab, head, norm, or replicate if every rank shall hold it whole",
            )
        elif len(own) > 1:
            rules = " and ".join(claim.rule for claim in own)
            builder.report(
                where=name, rule=own[0].rule, what=f"the parameter is claimed by {rules}", todo="keep one of them"
            )
    layouts = {str(claim.layout): claim for claim in claims}
    if len(layouts) > 1:
        said = ", ".join(f"{claim.name} is {layout}" for layout, claim in layouts.items())
        builder.report(
            where=names[0],
            rule=claims[0].rule,
            what=f"tied weights {', '.join(names)} would lie differently: {said}",
            todo="give all names of one parameter the same style",
        )
