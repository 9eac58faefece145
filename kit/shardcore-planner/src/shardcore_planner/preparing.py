"""What a trace needs: the configuration, the plan, and which blocks are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from shardcore.clients import client_of
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.plan import ShardPlan
from shardcore.plugins.registry import default_registry
from shardcore.policy import Policy
from shardcore_planner.workload import Workload


def configured(config: ShardConfig, workload: Workload) -> ShardConfig:
    """Return the configuration of a step, with all sizes.

    Raises:
        ConfigError: blocks would be compiled.
        NotSupportedError: experts would travel.
    """
    if not workload.trains:
        config = ShardConfig.of(config, inference_only=True)
    if config.enable_jit_fused is True:
        raise ConfigError("blocks that are compiled cannot be planned; leave enable_jit_fused out to plan without")
    if (config.expert_parallel_size or 1) > 1:
        raise NotSupportedError(
            "expert_parallel_size cannot be planned: how many tokens travel is known when they do. Plan without it: "
            "parameters, gradients and optimizer state are the same per rank"
        )
    return config.resolve(config.ranks)


def adapted(model: nn.Module, workload: Workload) -> nn.Module:
    """Return ``model``, on meta, with the adapters that the workload trains and all else frozen; itself without any.

    Raises:
        ConfigError: no client for PEFT is installed, or PEFT takes no such model.
    """
    if workload.lora is None:
        return model
    client = client_of("peft")
    if client is None:
        raise ConfigError(
            "adapters are planned with PEFT, whose client is not installed. From a checkout: python -m pip install "
            "./clients/shardcore-peft"
        )
    found: nn.Module = client.with_adapters(model, workload.lora)
    return found


def planned(
    model: nn.Module, config: ShardConfig, policy: type[Policy] | None = None, *, device_type: str | None = "cpu"
) -> ShardPlan:
    """Return the plan by ``policy``, or by the one that an installed pack has for the model."""
    if policy is not None:  # the packs are looked at only if it delegates
        delegates = lambda cls: default_registry().policy_for(cls)  # noqa: E731  # called late
        return compile_plan(policy, model, config, delegates=delegates, device_type=device_type)
    registry = default_registry()
    found, origin = registry.policy_for(type(model))
    return compile_plan(
        found,
        model,
        config,
        origin=origin,
        modules=registry.modules_for(config),
        delegates=registry.policy_for,
        device_type=device_type,
    )


def recomputed(model: nn.Module, config: ShardConfig, lists: Iterable[str]) -> Iterator[str]:
    """Yield the names of the blocks that are recomputed in the backward."""
    switch = config.gradient_checkpoint_config
    if switch is not None and switch.num_ckpt_layers_per_stage is not None:
        raise ConfigError(
            "blocks that are recomputed by the number for each stage cannot be planned; plan with a share or a number "
            "of all blocks"
        )
    if switch is not None:
        for name in lists:
            yield from (f"{name}.{i}" for i in range(switch.blocks(len(list(model.get_submodule(name).children())))))


def recomputing(config: ShardConfig, keep: dict[str, list[int]], recomputed: list[str]) -> ShardConfig:
    """Return the configuration that recomputes, of the blocks that are kept, those that are recomputed of all."""
    if config.gradient_checkpoint_config is None:
        return config
    counts = {sum(f"{name}.{index}" in recomputed for index in indices) for name, indices in keep.items()}
    if all(f"{name}.{index}" in recomputed for name, indices in keep.items() for index in indices):
        every = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
        return ShardConfig.of(config, gradient_checkpoint_config=every)
    if len(counts) > 1:
        raise ConfigError(
            "a part of the blocks is recomputed, of several lists: that cannot be planned; recompute all or none"
        )
    return ShardConfig.of(config, gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=counts.pop()))
