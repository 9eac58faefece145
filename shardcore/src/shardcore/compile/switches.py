"""Turns the kernel and recomputation switches of `ShardConfig` into steps, and records what each came to."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator

from torch import nn

from shardcore import _env
from shardcore.compile.parts import policy_at
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError, Problem
from shardcore.plan.cut import Cut
from shardcore.plan.digest import Choice
from shardcore.plan.stages import Stages
from shardcore.plan.steps.base import Step
from shardcore.plan.steps.local import Compile, FreezeForInference
from shardcore.policy import Policy

#: The named blocks of each list.
Blocks = dict[str, list[tuple[str, nn.Module]]]


def optimize(
    policy: Policy,
    model: nn.Module,
    config: ShardConfig,
    stages: Stages | None,
    device_type: str,
    planned: list[Step],
) -> Iterator[Step | Choice | Problem]:
    """Yield the steps that the switches of ``config`` add to those ``planned`` by the rules, and what they came to.

    ``stages`` are those of the policy, by names that the model has.
    """
    if switch := config.enable_flash_attention:
        yield from _flash_attention(policy, device_type, asked=switch != "auto" and switch)
    if config.enable_fused_normalization:
        yield Choice(switch="enable_fused_normalization", outcome=_fused(planned))
    if config.enable_jit_fused:
        yield from _compile(policy, _blocks(policy, model, stages), config, device_type)
    if config.gradient_checkpoint_config is not None:
        yield from _recompute(policy, model, config, stages)
    if config.inference_only:
        yield FreezeForInference(path="")
    yield from _unread(policy, config)


def _flash_attention(policy: Policy, device_type: str, *, asked: bool | str) -> Iterator[Step | Choice | Problem]:
    switch = "enable_flash_attention"
    try:
        step = policy.flash_attention(device_type, asked=asked)
    except NotSupportedError as error:
        if asked:
            yield Problem(
                where="",
                rule=f"ShardConfig.{switch}={asked!r}",
                what=f"flash attention is impossible: {error}",
                todo=f"mend that, or say {switch}='auto' to use it wherever it is possible",
            )
        else:
            yield Choice(switch=switch, outcome=f"off: {error}")
    else:
        yield step
        yield Choice(switch=switch, outcome=step.describe())


def _fused(planned: list[Step]) -> str:
    count = Counter(step.fuses for step in planned if step.fuses)
    said = [f"{what} for {modules} modules" for what, modules in sorted(count.items())]
    return ", ".join(said) or "nothing to do: torch's own norms are fused"


def _compile(
    policy: Policy, found: Blocks | None, config: ShardConfig, device_type: str
) -> Iterator[Step | Choice | Problem]:
    """Compile all blocks if it was asked for: on the CPU nothing was gained, and elsewhere it was not measured."""
    switch = "enable_jit_fused"
    if config.enable_jit_fused is not True:
        yield Choice(switch=switch, outcome="off: compiling gained nothing where it was measured, on the CPU")
        return
    rule = f"ShardConfig.{switch}=True"
    if reason := _no_graphs(config, device_type):
        yield Problem(where="", rule=rule, what=reason, todo=f"mend that, or leave {switch} alone")
    elif found is None:
        yield _no_blocks(policy, rule)
    else:
        blocks = [f"{name}.{index}" for name, children in found.items() for index, _ in children]
        yield from (Compile(path=path) for path in blocks)
        yield Choice(switch=switch, outcome=f"{len(blocks)} blocks are compiled while training")


def _no_graphs(config: ShardConfig, device_type: str) -> str | None:
    """Say why blocks cannot be compiled, or return None."""
    if config.inference_only:
        return "blocks are compiled while training, and inference_only=True rules that out"
    if device_type == "cpu" and not any(map(shutil.which, _env.compilers())):
        return "torch.compile needs a C++ compiler on the CPU, and none was found (install g++, or set CXX)"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on CUDA, which is not installed (pip install triton)"
    return None


def _blocks(policy: Policy, model: nn.Module, stages: Stages | None) -> Blocks | None:
    """Return the named blocks of each list that the model has; None if the policy names no lists."""
    if stages is None or not (policy.stages and policy.stages.lists):
        return None
    return {name: list(model.get_submodule(name).named_children()) for name in stages.lists}


def _no_blocks(policy: Policy, rule: str) -> Problem:
    what = f"{type(policy).__qualname__} does not say where the model's blocks are"
    return Problem(where="", rule=rule, what=what, todo="give the policy stages=Stages(blocks=...)")


def _recompute(
    policy: Policy, model: nn.Module, config: ShardConfig, stages: Stages | None
) -> Iterator[Step | Problem]:
    switch = config.gradient_checkpoint_config
    assert switch is not None  # for the type: the caller asks
    rule = f"ShardConfig.gradient_checkpoint_config={switch}"
    found = _blocks(policy, model, stages)
    if found is None:
        yield _no_blocks(policy, rule)
        return
    where = ", ".join(found)
    try:
        for path in _recomputed(model, config, stages, switch, found):
            yield policy_at(policy, path).recompute(path, model.get_submodule(path))
    except (ConfigError, NotSupportedError) as error:
        yield Problem(where=where, rule=rule, what=str(error), todo="change or remove gradient_checkpoint_config")


def _recomputed(
    model: nn.Module, config: ShardConfig, stages: Stages | None, switch: GradientCheckpointConfig, found: Blocks
) -> Iterator[str]:
    """Yield the names of the blocks that are recomputed."""
    if switch.num_ckpt_layers_per_stage is not None:
        cut = Cut.by(config, model, stages)
        counts = switch.of_stages([len(cut.held(stage)) for stage in range(len(cut))])
        for stage, count in enumerate(counts):
            yield from (cut.blocks[number] for number in cut.held(stage)[:count])
        return
    # The share, or the number, is that of each list: an encoder and a decoder are recomputed alike.
    for name, blocks in found.items():
        yield from (f"{name}.{index}" for index, _ in blocks[: switch.blocks(len(blocks))])


def _unread(policy: Policy, config: ShardConfig) -> Iterator[Problem]:
    """Report settings that nothing would read."""
    read = policy.extra_kwargs.union(*(part.extra_kwargs for part in policy.parts.values()))
    for name in sorted(set(config.extra_kwargs) - read, key=str):
        known = ", ".join(sorted(read)) or "none"
        yield Problem(
            where="",
            rule=f"ShardConfig.extra_kwargs[{name!r}]",
            what=f"{type(policy).__qualname__} does not read it; what it reads: {known}",
            todo="remove it, or correct the name",
        )
