"""A word for layers that are left out at random, by a probability that a module reads from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from shardcore.policy import Rule, Scope


def layer_drop_of_config(name: str) -> Rule:
    """What `shardcore.styles.layer_drop` says, of ``name`` in the configuration of the module.

    Under sequence parallelism it is refused too: the last layer gathers the tokens, and would be left out with the
    others.
    """
    return LayerDropOfConfig(text=f"layer_drop_of_config({name!r})", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDropOfConfig(Rule):
    """`layer_drop_of_config`."""

    name: str

    @override
    def plan(self, scope: Scope) -> None:
        rate, config = getattr(scope.module.config, self.name), scope.config
        if not rate or config.inference_only:
            return
        todo = f"set config.{self.name} to 0, or use tensor parallelism alone"
        if (config.data_parallel_size or 1) > 1:
            what = "every data-parallel replica would leave out other layers in training"
            scope.problem(f"config.{self.name} is {rate}: {what}", todo)
        if config.enable_sequence_parallelism:
            what = "the layers between which tokens are split could be left out, the one that gathers them too"
            scope.problem(f"config.{self.name} is {rate}: {what}", todo)
