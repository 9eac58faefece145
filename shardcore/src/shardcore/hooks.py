"""The plugin author's manual: everything a pack may say to shardcore.

A *pack* is an installed distribution that tells shardcore how to shard model classes. It consists of three things:

1. An entry point in the group `shardcore.packs`, whose name is the short name of the pack and whose value is a module:

       [project.entry-points."shardcore.packs"]
       llama = "shard_llama.plugin"

2. That module, the *plugin*, which implements the hooks below. It imports this module and nothing heavier:

       from shardcore.hooks import PolicySpec, hookimpl

       @hookimpl
       def shardcore_policies():
           return [
               PolicySpec(
                   target="transformers.models.llama.modeling_llama.LlamaForCausalLM",
                   policy="shard_llama.policy:LlamaForCausalLMPolicy",
               )
           ]

3. The policies, in another module, which is imported when a model that it serves is sharded and not before.

Rules that hold for every hook:

- A function is an implementation if it is marked with `hookimpl` and has the name of a hook; all of them start with
  `shardcore_`. Attributes of the plugin with other names are not looked at.
- An implementation may leave out arguments that it does not need. An argument that the hook does not have is an error,
  and so is a hook that this shardcore does not have, unless it is marked `hookimpl(optionalhook=True)`.
- Hooks grow by new arguments, and an existing argument never changes its meaning: a pack that works today goes on
  working. What cannot be said in that way raises `API_VERSION`.
- Packs load in the order of (entry point name, value, distribution), which is the same on every rank. No pack may rely
  on another one having loaded before it.
- A pack whose import or hook raises is left out with a warning and named in the errors that follow from its absence;
  the other packs are not affected. With `SHARDCORE_STRICT=1` it is an error at once.

This module imports neither torch nor transformers, and a plugin must not either: all packs are loaded to find the one
that serves a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import pluggy

from shardcore.errors import ConfigError

__all__ = ["API_VERSION", "PolicySpec", "hookimpl", "hookspec", "shardcore_policies"]

#: The newest form of `PolicySpec` that this release understands.
API_VERSION = 1

#: Marks a function of this module as a hook.
hookspec = pluggy.HookspecMarker("shardcore")

#: Marks a function of a plugin as the implementation of a hook.
hookimpl = pluggy.HookimplMarker("shardcore")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """One model class and the policy that shards it, both as strings, so that naming them imports nothing.

    A spec also serves the subclasses of its class, unless one of them, or a class nearer to the model's own, has a
    spec itself. Of several specs for one class the highest priority wins; equal priorities are an error when, and only
    when, such a model is sharded.

    Attributes:
        target: the class of the model as `package.module.Class`, by the module that defines it.
        policy: the policy class as `module:Class`.
        priority: a pack that means to replace another pack's policy says a number above its (which is 0 by default).
        requires: a PEP 508 requirement such as `transformers>=5`. The spec counts only where the installed version
            meets it (prereleases count as versions), so that one class can have one policy before and another after
            the release of a library that renamed its modules.
        api: the `API_VERSION` for which the spec was written.

    Example:
        >>> spec = PolicySpec(target="my_models.mlp.Mlp", policy="shard_mine.policy:MlpPolicy")
        >>> spec.priority
        0
    """

    target: str
    policy: str
    priority: int = 0
    requires: str | None = None
    api: int = 1

    def __post_init__(self) -> None:
        if not _is_dotted(self.target, at_least=2):
            raise ConfigError(f"PolicySpec: target is {self.target!r}; wanted a string like 'package.module.Class'")
        parts = str(self.policy).split(":")
        if len(parts) != 2 or not all(_is_dotted(part) for part in parts):
            raise ConfigError(f"PolicySpec: policy is {self.policy!r}; wanted a string like 'module:Class'")
        if self.api < 1:
            raise ConfigError(f"PolicySpec: api is {self.api}; wanted 1 or more (this shardcore knows {API_VERSION})")
        if self.requires is not None:
            _check_requirement(self.requires)


@hookspec
def shardcore_policies() -> list[PolicySpec]:  # type: ignore[empty-body]  # a specification is never called
    """Say which model classes this pack can shard.

    Called once per process, when a model is first sharded or the packs are listed. Return a list, which may be empty
    if what the pack serves is not installed.
    """


def _is_dotted(text: object, at_least: int = 1) -> bool:
    """Whether `text` is a string of so many Python names or more, joined by dots."""
    names = text.split(".") if isinstance(text, str) else []
    return len(names) >= at_least and all(name.isidentifier() for name in names)


def _check_requirement(requires: str) -> None:
    """Refuse a requirement that cannot be compared with an installed version."""
    # Imported here because most specs have no requirement, and every plugin pays for what this module imports.
    from packaging.requirements import InvalidRequirement, Requirement

    wanted = "a PEP 508 requirement like 'transformers>=5'"
    try:
        requirement = Requirement(requires)
    except InvalidRequirement as error:
        raise ConfigError(f"PolicySpec: requires is {requires!r}; wanted {wanted}") from error
    if requirement.url is not None or requirement.extras:
        raise ConfigError(f"PolicySpec: requires is {requires!r}; wanted {wanted}, without extras and without a URL")
