"""Turns the kernel and recomputation switches of `ShardConfig` into steps, and records what each came to."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter

from shardcore import _env
from shardcore.compile.builder import PlanBuilder
from shardcore.compile.parts import policy_at
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.plan.cut import Cut
from shardcore.plan.digest import Choice
from shardcore.plan.stages import Stages
from shardcore.plan.steps.local import Compile, FreezeForInference
from shardcore.policy import Policy
from shardcore.transfer.products import without_kernels


def optimize(builder: PlanBuilder, policy: Policy, stages: Stages | None, device_type: str) -> tuple[Choice, ...]:
    """Add the steps of the switches of the configuration to those of the rules, and return what the switches came to.

    ``stages`` are those of the policy, by names that the model has.
    """
    config, outcomes = builder.config, dict[str, str | None]()
    if switch := config.enable_flash_attention:
        asked = switch != "auto" and switch
        outcomes["enable_flash_attention"] = _flash_attention(builder, policy, device_type, asked=asked)
    if config.enable_fused_normalization is not False:
        count = Counter(step.fuses for step in builder.carried_out if step.fuses)
        said = ", ".join(f"{what} for {modules} modules" for what, modules in sorted(count.items()))
        nothing = "nothing to do: torch's own norms are fused" if config.enable_fused_normalization else None
        outcomes["enable_fused_normalization"] = said or nothing
    if config.enable_sequence_overlap:
        outcomes["enable_sequence_overlap"] = _overlap(builder, device_type)
    if config.enable_jit_fused:
        outcomes["enable_jit_fused"] = _compile(builder, policy, stages, device_type)
    if config.gradient_checkpoint_config is not None:
        _recompute(builder, policy, stages, config.gradient_checkpoint_config)
    if config.inference_only:
        builder.add_late(FreezeForInference(path=""))
    _report_unread(builder, policy)
    return tuple(Choice(switch=switch, outcome=outcome) for switch, outcome in outcomes.items() if outcome is not None)


def _flash_attention(builder: PlanBuilder, policy: Policy, device_type: str, *, asked: bool | str) -> str | None:
    """Add the policy's step, and return what came of it, or None after reporting why nothing did."""
    switch = "enable_flash_attention"
    try:
        step = policy.flash_attention(device_type, asked=asked)
    except NotSupportedError as error:
        if not asked:
            return f"off: {error}"
        builder.report(
            rule=f"ShardConfig.{switch}={asked!r}",
            what=f"flash attention is impossible: {error}",
            todo=f"mend that, or say {switch}='auto' to use it wherever it is possible",
        )
        return None
    builder.add_late(step)
    return step.describe()


def _overlap(builder: PlanBuilder, device_type: str) -> str | None:
    if builder.config.enable_sequence_overlap is True:
        return "tokens travel in pieces beside products"
    if (reason := without_kernels(device_type)) is None:
        return "torch's kernels of symmetric memory"
    rule = "ShardConfig.enable_sequence_overlap='symm_mem'"
    builder.report(rule=rule, what=reason, todo="say enable_sequence_overlap=True, which needs no kernels")
    return None


def _compile(builder: PlanBuilder, policy: Policy, stages: Stages | None, device_type: str) -> str | None:
    """Compile all blocks if it was asked for: on the CPU nothing was gained, and elsewhere it was not measured."""
    if builder.config.enable_jit_fused is not True:
        return "off: compiling gained nothing where it was measured, on the CPU"
    rule = "ShardConfig.enable_jit_fused=True"
    if reason := _no_graphs(builder.config, device_type):
        builder.report(rule=rule, what=reason, todo="mend that, or leave enable_jit_fused alone")
        return None
    if (found := _blocks(builder, policy, stages, rule)) is None:
        return None
    blocks = [path for paths in found.values() for path in paths]
    for path in blocks:
        builder.add_late(Compile(path=path))
    return f"{len(blocks)} blocks are compiled while training"


def _no_graphs(config: ShardConfig, device_type: str) -> str | None:
    """Say why blocks cannot be compiled, or return None."""
    if config.inference_only:
        return "blocks are compiled while training, and inference_only=True rules that out"
    if device_type == "cpu" and not any(map(shutil.which, _env.compilers())):
        return "torch.compile needs a C++ compiler on the CPU, and none was found (install g++, or set CXX)"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton on CUDA, which is not installed (pip install triton)"
    return None


def _blocks(builder: PlanBuilder, policy: Policy, stages: Stages | None, rule: str) -> dict[str, list[str]] | None:
    """Return the names of the blocks of each list that the model has; None after reporting that none is named."""
    if stages is None or not (policy.stages and policy.stages.lists):
        what = f"{type(policy).__qualname__} does not say where the model's blocks are"
        builder.report(rule=rule, what=what, todo="give the policy stages=Stages(blocks=...)")
        return None
    lists = {name: builder.model.get_submodule(name).named_children() for name in stages.lists}
    return {name: [f"{name}.{index}" for index, _ in children] for name, children in lists.items()}


def _recompute(builder: PlanBuilder, policy: Policy, stages: Stages | None, switch: GradientCheckpointConfig) -> None:
    rule = f"ShardConfig.gradient_checkpoint_config={switch}"
    if (found := _blocks(builder, policy, stages, rule)) is None:
        return
    try:
        if switch.num_ckpt_layers_per_stage is None:
            # The share, or the number, is that of each list: an encoder and a decoder are recomputed alike.
            paths = [path for blocks in found.values() for path in blocks[: switch.blocks(len(blocks))]]
        else:
            cut = Cut.by(builder.config, builder.model, stages)
            counts = switch.of_stages([len(cut.held(stage)) for stage in range(len(cut))])
            paths = [cut.blocks[number] for stage, count in enumerate(counts) for number in cut.held(stage)[:count]]
        for path in paths:
            builder.add_late(policy_at(policy, path).recompute(path, builder.model.get_submodule(path)))
    except (ConfigError, NotSupportedError) as error:
        todo = "change or remove gradient_checkpoint_config"
        builder.report(where=", ".join(found), rule=rule, what=str(error), todo=todo)


def _report_unread(builder: PlanBuilder, policy: Policy) -> None:
    """Report settings that nothing would read."""
    read = policy.extra_kwargs.union(*(part.extra_kwargs for part in policy.parts.values()))
    for name in sorted(set(builder.config.extra_kwargs) - read, key=str):
        known = ", ".join(sorted(read)) or "none"
        builder.report(
            rule=f"ShardConfig.extra_kwargs[{name!r}]",
            what=f"{type(policy).__qualname__} does not read it; what it reads: {known}",
            todo="remove it, or correct the name",
        )
