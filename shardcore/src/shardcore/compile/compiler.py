"""Compiling a policy against one model and one configuration."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardcore.compile.builder import Claim, Draft, DraftScope, Modules
from shardcore.compile.switches import optimize
from shardcore.compile.tensor_checks import report_tensors
from shardcore.config import ShardConfig
from shardcore.errors import PlanError, Problem, ShardcoreError
from shardcore.mesh import device_type_here
from shardcore.plan import Choice, ParameterPlan, ShardPlan
from shardcore.plan.steps import Step
from shardcore.policy import Heads, ModulePolicy, ModulePolicyDescription, Policy
from shardcore.styles.shardformer import rows_of

__all__ = [
    "compile_plan",
]


def compile_plan(
    policy: Policy | type[Policy],
    model: nn.Module,
    config: ShardConfig,
    *,
    origin: str = "",
    device_type: str | None = None,
    modules: Modules | None = None,
) -> ShardPlan:
    """Compile ``policy`` against ``model``; nothing is changed, and the model may be on the meta device.

    Args:
        policy: a policy or its class.
        model: the unsharded model.
        config: the configuration; sizes that are None are derived for as many ranks as it names.
        origin: the distribution and version that the policy comes from.
        device_type: where the model will run, ``"cuda"`` or ``"cpu"``; by default where `shardcore.shard` would.
        modules: what packs bring in place of parallel modules (`shardcore.Registry.modules_for`).

    Raises:
        PlanError: the policy does not fit; carries every problem.
    """
    policy = policy() if isinstance(policy, type) else policy
    config = config.resolve(config.ranks)
    policy.set_model(model)
    policy.set_shard_config(config)
    ranks = config.tensor_parallel_size or 1
    draft = Draft(model, config, ranks, modules=modules)
    row = f"{type(policy).__qualname__}.checks"
    for check in policy.checks:
        if problem := check.problem(model, ranks):
            draft.problems.append(Problem(where="", row=row, what=problem[0], todo=problem[1]))
            draft.heads_failed |= isinstance(check, Heads)
        elif isinstance(check, Heads):
            draft.heads = check.counts(model, ranks)
    draft.paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    checked = list(draft.problems)
    _plan_rows(draft, _module_policy(policy, model, ranks))
    if draft.refusals:
        raise PlanError(_subject(policy, model, ranks), [*checked, *draft.refusals])
    draft.check()
    report_tensors(draft)
    choices = _optimize(draft, policy, device_type or device_type_here())
    parameters = _parameters(draft)
    if draft.problems:
        raise PlanError(_subject(policy, model, ranks), draft.problems)
    return ShardPlan(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        policy=f"{type(policy).__module__}.{type(policy).__qualname__}",
        origin=origin,
        config=config,
        parameters=parameters,
        steps=_ordered(draft.carried_out),
        stages=policy.stages,
        choices=choices,
    )


def _optimize(draft: Draft, policy: Policy, device_type: str) -> tuple[Choice, ...]:
    choices = []
    for item in list(optimize(policy, draft.model, draft.config, device_type, draft.carried_out)):
        if isinstance(item, Choice):
            choices.append(item)
        elif isinstance(item, Problem):
            draft.problems.append(item)
        else:
            draft.steps.setdefault(repr(item), item)
    return tuple(choices)


def _module_policy(policy: Policy, model: nn.Module, ranks: int) -> ModulePolicy:
    try:
        return policy.module_policy()
    except ShardcoreError:
        raise
    except Exception as error:
        what = f"it raised {type(error).__name__}: {error}"
        row = f"{type(policy).__qualname__}.module_policy"
        problem = Problem(where="", row=row, what=what, todo="correct the policy, which is at fault or too new or old")
        raise PlanError(_subject(policy, model, ranks), [problem]) from error


def _subject(policy: Policy, model: nn.Module, ranks: int) -> str:
    return f"{type(policy).__qualname__} does not fit {type(model).__qualname__} at tensor_parallel_size {ranks}"


def _plan_rows(draft: Draft, module_policy: ModulePolicy) -> None:
    modules = list(draft.model.named_modules())
    for key, value in module_policy.items():
        rows = rows_of(value) if isinstance(value, ModulePolicyDescription) else list(value)
        matching = [(path, module) for path, module in modules if _matches(module, key)]
        name = key if isinstance(key, str) else key.__qualname__
        if not matching and not all(row.optional for row in rows):
            kinds = sorted({type(module).__name__ for _, module in modules})
            draft.problems.append(
                Problem(
                    where="",
                    row=f"{name!r}: [{', '.join(row.text for row in rows)}]",
                    what=f"no module of class {name!r}; the model has {', '.join(kinds)}",
                    todo="correct the class name for this version of the model, or make the rows optional=True",
                )
            )
        for row in rows:
            for path, module in matching:
                row.plan(DraftScope(draft, row, path, module))


def _matches(module: nn.Module, key: str | type[nn.Module]) -> bool:
    return any(cls is key or cls.__name__ == key for cls in type(module).__mro__)


def _parameters(draft: Draft) -> tuple[ParameterPlan, ...]:
    """Account for every parameter: claimed under each of its names, once, with one layout."""
    names: dict[int, list[str]] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, parameter in draft.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        by_id[id(parameter)] = parameter
    plans = []
    for key, parameter in by_id.items():
        first, *aliases = names[key]
        places = list(dict.fromkeys(_first_name(draft, name) for name in names[key]))
        # The first claim of each place: more than one is a problem of its own.
        claims = [claim for name in places for claim in draft.claims.get(name, ())[:1]]
        _check_claims(draft, places, claims)
        if draft.ranks > 1 and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            draft.problems.append(
                Problem(
                    where=first,
                    row="(none)",
                    what="the parameter has gradient hooks, which would stay with the whole tensor that is replaced",
                    todo="register them after shard(), for gradients that are DTensors",
                )
            )
        plans.append(
            ParameterPlan(
                name=first,
                aliases=tuple(aliases),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype),
                layout=claims[0].layout if claims else None,
            )
        )
    return tuple(plans)


def _first_name(draft: Draft, name: str) -> str:
    """Return the name of a parameter in its module's first place."""
    owner, _, short = name.rpartition(".")
    return ".".join(filter(None, (draft.paths[id(draft.model.get_submodule(owner))], short)))


def _check_claims(draft: Draft, names: Sequence[str], claims: Sequence[Claim]) -> None:
    for name in names:
        own = draft.claims.get(name, [])
        if not own:
            draft.problems.append(
                Problem(
                    where=name,
                    row="(none)",
                    what=f"the parameter {tuple(draft.model.get_parameter(name).shape)} is covered by no row",
                    todo="add a row for it: region, vocab, head, norm, or replicate if every rank shall hold it whole",
                )
            )
        elif len(own) > 1:
            rows = " and ".join(claim.row for claim in own)
            draft.problems.append(
                Problem(where=name, row=own[0].row, what=f"the parameter is claimed by {rows}", todo="keep one of them")
            )
    layouts = {str(claim.layout): claim for claim in claims}
    if len(layouts) > 1:
        said = ", ".join(f"{claim.name} is {layout}" for layout, claim in layouts.items())
        draft.problems.append(
            Problem(
                where=names[0],
                row=claims[0].row,
                what=f"tied weights {', '.join(names)} would lie differently: {said}",
                todo="give all names of one parameter the same style",
            )
        )


def _ordered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return steps in the order in which they build on each other, and those of one phase in that of the policy."""
    return tuple(sorted(steps, key=lambda step: step.phase))
