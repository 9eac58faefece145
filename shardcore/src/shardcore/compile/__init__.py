"""Compile a policy against one model and one configuration. Pure: nothing is changed, meta tensors suffice."""

from __future__ import annotations

from shardcore.compile.compiler import compile_plan
from shardcore.compile.data_policy import DataPolicy, policy_of

__all__ = ["DataPolicy", "compile_plan", "policy_of"]
