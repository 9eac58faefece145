"""Compile a policy against one model and one configuration. Pure: nothing is changed, meta tensors suffice."""

from __future__ import annotations

from shardcore.compile.compiler import compile_plan

__all__ = ["compile_plan"]
