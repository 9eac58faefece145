"""A word for layers that are left out at random, by a probability that a module reads from its configuration."""

from __future__ import annotations

from shardcore.policy import Rule, Scope, Word


def layer_drop_of_config(name: str) -> Rule:
    """What `shardcore.styles.layer_drop` says, of ``name`` in the configuration of the module.

    Under sequence parallelism it is refused too: the last layer gathers the tokens, and would be left out with the
    others.
    """

    def plan(scope: Scope) -> None:
        rate, config = getattr(scope.module.config, name), scope.config
        if not rate or config.inference_only:
            return
        todo = f"set config.{name} to 0, or use tensor parallelism alone"
        if (config.data_parallel_size or 1) > 1:
            what = "every data-parallel replica would leave out other layers in training"
            scope.problem(f"config.{name} is {rate}: {what}", todo)
        if config.enable_sequence_parallelism:
            what = "the layers between which tokens are split could be left out, the one that gathers them too"
            scope.problem(f"config.{name} is {rate}: {what}", todo)

    return Word(text=f"layer_drop_of_config({name!r})", planned=plan)
