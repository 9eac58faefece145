"""The wishes of a configuration that a policy fulfils in its own way: the steps they become, and what was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shardcore.checkpointing import GradientCheckpointConfig
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError, NotSupportedError, Problem
from shardcore.nn import Replicated
from shardcore.policy import Policy
from shardcore.steps import FreezeForInference, FuseNorm, Step, Swap

__all__ = ["Choice", "optimize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What became of a wish that leaves a choice.

    Attributes:
        wish: the field of the configuration.
        outcome: what was chosen, with the reason if it is less than wished for.
    """

    wish: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.wish}: {self.outcome}"


def optimize(
    policy: Policy, model: nn.Module, config: ShardConfig, device_type: str, planned: list[Step]
) -> Iterator[Step | Choice | Problem]:
    """Yield the steps that the switches of ``config`` add to those ``planned`` by the rows, and what they came to."""
    if wish := config.enable_flash_attention:
        yield from _flash_attention(policy, device_type, asked=wish is True)
    if config.enable_fused_normalization:
        yield Choice(wish="enable_fused_normalization", outcome=_fused(planned))
    if config.enable_jit_fused:
        yield Choice(wish="enable_jit_fused", outcome="off: planned for release 0.3")
    if config.gradient_checkpoint_config is not None:
        yield from _recompute(policy, model, config.gradient_checkpoint_config)
    if config.inference_only:
        yield FreezeForInference(path="")
    yield from _unread(policy, config)


def _flash_attention(policy: Policy, device_type: str, *, asked: bool) -> Iterator[Step | Choice | Problem]:
    wish = "enable_flash_attention"
    try:
        step = policy.flash_attention(device_type, asked=asked)
    except NotSupportedError as error:
        if asked:
            yield Problem(
                where="",
                row=f"ShardConfig.{wish}=True",
                what=f"flash attention is impossible: {error}",
                todo=f"mend that, or say {wish}='auto' to use it wherever it is possible",
            )
        else:
            yield Choice(wish=wish, outcome=f"off: {error}")
    else:
        yield step
        yield Choice(wish=wish, outcome=step.describe())


def _fused(planned: list[Step]) -> str:
    ours = sum(isinstance(step, FuseNorm) for step in planned)
    brought = sorted(
        {
            step.target.__name__
            for step in planned
            if isinstance(step, Swap) and issubclass(step.target, Replicated) and step.target is not Replicated
        }
    )
    said = [f"torch's rms_norm for {ours} modules"] if ours else []
    said += [f"{', '.join(brought)} of a pack"] if brought else []
    return ", ".join(said) or "nothing to do: torch's own norms are fused"


def _recompute(policy: Policy, model: nn.Module, wish: GradientCheckpointConfig) -> Iterator[Step | Problem]:
    lists = policy.stages.lists if policy.stages else ()
    where = ", ".join(lists)
    row = f"ShardConfig.gradient_checkpoint_config={wish}"
    if not where:
        what = f"{type(policy).__qualname__} does not say where the model's blocks are"
        yield Problem(where="", row=row, what=what, todo="give the policy stages=Stages(blocks=...)")
        return
    try:
        found = {name: list(model.get_submodule(name).named_children()) for name in lists}
    except AttributeError as error:
        yield Problem(where=where, row=row, what=str(error), todo=f"correct stages of {type(policy).__qualname__}")
        return
    try:
        # The share, or the number, is that of each list: an encoder and a decoder are recomputed alike.
        for name, blocks in found.items():
            for index, block in blocks[: wish.blocks(len(blocks))]:
                yield policy.recompute(f"{name}.{index}", block)
    except (ConfigError, NotSupportedError) as error:
        yield Problem(where=where, row=row, what=str(error), todo="change or remove gradient_checkpoint_config")


def _unread(policy: Policy, config: ShardConfig) -> Iterator[Problem]:
    """Report settings that nothing would read."""
    for name in sorted(set(config.extra_kwargs) - policy.extra_kwargs, key=str):
        known = ", ".join(sorted(policy.extra_kwargs)) or "none"
        yield Problem(
            where="",
            row=f"ShardConfig.extra_kwargs[{name!r}]",
            what=f"{type(policy).__qualname__} does not read it; what it reads: {known}",
            todo="remove it, or correct the name",
        )
