"""Plans of small models, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tiny import TinyPolicy, build
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.plan import ShardPlan
from shardcore.policy import ModulePolicy, Policy


def plan_of(model: nn.Module | None = None, policy: type[Policy] = TinyPolicy, tp: int = 2, **fields: Any) -> ShardPlan:
    """Compile for ``tp`` ranks; the model is by default that of `tiny`."""
    return compile_plan(policy, build() if model is None else model, ShardConfig.of(tp=tp, **fields))


def policy_of(rules: ModulePolicy, checks: Sequence[Any] = ()) -> type[Policy]:
    """Return a policy with these rules."""
    return type("Given", (Policy,), {"checks": checks, "module_policy": lambda self: rules})


def failure_of(
    model: nn.Module | None = None, policy: type[Policy] = TinyPolicy, tp: int = 2, **fields: Any
) -> PlanError:
    """Compile what cannot be planned, and return the error."""
    with pytest.raises(PlanError) as caught:
        plan_of(model, policy, tp, **fields)
    return caught.value


def problems_of(
    model: nn.Module | None = None, policy: type[Policy] = TinyPolicy, tp: int = 2, **fields: Any
) -> list[str]:
    """Compile what cannot be planned, and return what is wrong with it."""
    return [str(problem) for problem in failure_of(model, policy, tp, **fields).problems]
