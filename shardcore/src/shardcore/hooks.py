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
                   policy="shard_llama.policy:LlamaPolicy",
               )
           ]

3. The policies, in another module, which is imported when a model that it serves is sharded and not before.

Its `pyproject.toml` says which releases of the patched library it works with, in two places that mean different things:

       [project]
       dependencies = ["shardcore>=0.1,<0.2", "transformers>=4.57.6"]

       [project.optional-dependencies]
       tested = ["transformers>=4.57.6,<5.25"]

The dependency is a floor: below it nothing can work, and installers refuse. The extra `tested` is the range that the
pack's own tests prove. It is no constraint for installers, so that packs with different ceilings can be installed
together; it is read from the metadata of the installed pack when a model is sharded. Outside of the range the user
gets an `UntestedVersionWarning`, and with `SHARDCORE_STRICT=1` an error. Prereleases are compared like any version. A
library that is not installed is not compared, and a pack without the extra is not checked.

The hooks:

| hook | says | called |
|---|---|---|
| `shardcore_policies` | which model classes the pack can shard | when packs are discovered |
| `shardcore_parallel_modules` | which modules it brings in place of shardcore's own | when packs are discovered |
| `shardcore_conformance_cases` | on which tiny models the conformance kit tests it | when packs are discovered |
| `shardcore_before_shard` | (observes) | on every rank, before a model is changed |
| `shardcore_after_shard` | (observes) | on every rank, after a model was changed |

Rules that hold for every hook:

- A function is an implementation if it is marked with `hookimpl` and has the name of a hook; all of them start with
  `shardcore_`. Attributes of the plugin with other names are not looked at.
- An implementation may leave out arguments that it does not need. An argument that the hook does not have is an error,
  and so is a hook that this shardcore does not have, unless it is marked `hookimpl(optionalhook=True)`.
- Hooks grow by new arguments, and an existing argument never changes its meaning: a pack that works today goes on
  working. What cannot be said in that way raises `API_VERSION`.
- Packs load in the order of (entry point name, value, distribution), which is the same on every rank. No pack may rely
  on another one having loaded before it. Each implementation is called by itself, so `tryfirst`, `trylast` and wrappers
  of pluggy have no meaning; a wrapper is an error.
- A user who passes `policy=` bypasses discovery: then no hook of any pack is called, and no module of a pack is used.
- All ranks need the same packs in the same versions. Ranks that differ in the policy, in the packs that observe or
  bring modules, or in any step of the plan get one error that names both sides, and nothing is changed. A policy must
  not let the order of a set decide anything, because that differs from process to process.
- A pack whose import or hook raises (`SystemExit` and what a test framework raises included) is left out with
  a warning and named in the errors that follow from its absence; the other packs are not affected. With
  `SHARDCORE_STRICT=1` it is an error at once. Nothing of a pack that the environment blocks is imported. Filters of
  warnings that a plugin sets are put back.

This module imports neither torch nor a library of models, and a plugin must not either: all packs are loaded to find
the one that serves a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import pluggy

from shardcore.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from shardcore.plan import ShardPlan

__all__ = [
    "API_VERSION",
    "ParallelModuleSpec",
    "PolicySpec",
    "hookimpl",
    "hookspec",
    "shardcore_after_shard",
    "shardcore_before_shard",
    "shardcore_conformance_cases",
    "shardcore_parallel_modules",
    "shardcore_policies",
]

#: The newest form of `PolicySpec` and `ParallelModuleSpec` that this release understands.
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
        target: the class of the model as `package.module.Class`, by the module that defines it. Between dots, ``*`` is
            any names: remote code's modules have those of their folder, `transformers_modules.*.Class`.
        policy: the policy class as `module:Class`.
        priority: a pack that means to replace another pack's policy says a number above its (which is 0 by default).
        requires: a PEP 508 requirement such as `transformers>=5`. The spec counts only where the installed version
            meets it (prereleases count as versions): one class can have another policy after a library's release.
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
        _check_names(self, "policy", self.policy)
        _check_terms(self)


#: The switches of `ShardConfig` that can turn a brought module on.
Option = Literal["enable_flash_attention", "enable_fused_normalization", "enable_jit_fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModuleSpec:
    """A module of this pack that stands in for one of shardcore's own wherever a policy of any pack would use that.

    A policy says what becomes of a submodule (a norm is replicated, a linear is split); shardcore has a class for each,
    and this spec offers another one for one native class: a fused norm, a kernel. It also serves subclasses of the
    native class, as far as they run its `forward`; a subclass with a `forward` of its own keeps shardcore's module. Of
    several specs for one class the highest priority wins; equal priorities are an error when, and only when, such a
    module is sharded.

    Attributes:
        target: the native class as `package.module.Class`, by the module that defines it.
        module: the brought class as `module:Class`: a subclass of `shardcore.nn.ParallelMixin`, namely of the class
            that it replaces. It is imported when a module of the native class is sharded.
        replaces: that class of shardcore, by its bare name: `Replicated` (norms and whatever keeps its own forward),
            `ColumnLinear`, `RowLinear`, `VocabEmbedding`, or another one of `shardcore.nn`.
        option: the switch of `ShardConfig` that turns it on; None means always.
        priority: as for `PolicySpec`.
        requires: as for `PolicySpec`.
        api: the `API_VERSION` for which the spec was written.

    Example:
        >>> spec = ParallelModuleSpec(
        ...     target="my_models.norms.Norm",
        ...     module="shard_mine.norms:FusedNorm",
        ...     replaces="Replicated",
        ...     option="enable_fused_normalization",
        ... )
        >>> spec.priority
        0
    """

    target: str
    module: str
    replaces: str
    option: Option | None = None
    priority: int = 0
    requires: str | None = None
    api: int = 1

    def __post_init__(self) -> None:
        _check_names(self, "module", self.module)
        if not isinstance(self.replaces, str) or not self.replaces.isidentifier():
            raise ConfigError(
                f"ParallelModuleSpec: replaces is {self.replaces!r}; wanted the bare name of a class of shardcore.nn, "
                "like 'Replicated'"
            )
        if self.option is not None and self.option not in get_args(Option):
            raise ConfigError(
                f"ParallelModuleSpec: option is {self.option!r}; wanted None or one of "
                f"{', '.join(map(repr, get_args(Option)))}"
            )
        _check_terms(self)


@hookspec
def shardcore_policies() -> list[PolicySpec]:  # type: ignore[empty-body]  # a specification is never called
    """Say which model classes this pack can shard.

    Called once per process, when a model is first sharded or the packs are listed. Return a list, which may be empty
    if what the pack serves is not installed.
    """


@hookspec
def shardcore_parallel_modules() -> list[ParallelModuleSpec]:  # type: ignore[empty-body]  # never called
    """Say which modules this pack brings in place of shardcore's own: kernels, fused layers.

    Called once per process, when packs are discovered. The modules are used by every policy that discovery finds, of
    whatever pack; not by a policy that a user passes as `policy=`.
    """


@hookspec
def shardcore_before_shard(model: nn.Module, plan: ShardPlan) -> None:
    """Observe a model that is about to be sharded.

    Called on every rank, in the order in which packs load, after all ranks agreed on the plan and before anything is
    changed; not called for a model whose policy a user passed as `policy=`. It must not change the model. What it
    raises on one rank is an error on all ranks that names this pack, and nothing is changed.

    Args:
        model: the unsharded model.
        plan: what will be done to it (where one rank is alone, `plan.steps` has only those that split nothing).
    """


@hookspec
def shardcore_after_shard(model: nn.Module, plan: ShardPlan) -> None:
    """Observe a model that was just sharded.

    Called on every rank, in the order in which packs load, after everything was changed and before FSDP2 wraps the
    model; not called for a model whose policy a user passed as `policy=`. It must not change the model. What it raises
    on one rank is an error on all ranks that names this pack, and the model is unusable from then on.

    Args:
        model: the sharded model; its parameters are DTensors where there are several tensor-parallel ranks.
        plan: what was done to it. After a policy's `preprocess` it is another one than before.
    """


@hookspec
def shardcore_conformance_cases() -> list[str]:  # type: ignore[empty-body]  # a specification is never called
    """Name the functions that return the tiny models on which the conformance kit tests this pack.

    Each one is a string `module:callable`. Nothing is imported before the kit runs, so that the functions may live in a
    module that imports torch and the model library.
    """


def _check_names(spec: PolicySpec | ParallelModuleSpec, name: str, offered: object) -> None:
    """Refuse a target, or what is ``offered`` for it, that does not name a class by its module."""
    kind = type(spec).__name__
    target = str(spec.target).replace(".*.", ".") if isinstance(spec, PolicySpec) else spec.target
    if not _is_dotted(target, at_least=2):
        raise ConfigError(f"{kind}: target is {spec.target!r}; wanted a string like 'package.module.Class'")
    if not is_reference(offered):
        raise ConfigError(f"{kind}: {name} is {offered!r}; wanted a string like 'module:Class'")


def _check_terms(spec: PolicySpec | ParallelModuleSpec) -> None:
    """Refuse a priority, an api or a requirement that means nothing, or cannot be compared with what is installed."""
    kind = type(spec).__name__
    if type(spec.priority) is not int:
        raise ConfigError(f"{kind}: priority is {spec.priority!r}; wanted an integer, like 1")
    if type(spec.api) is not int or spec.api < 1:
        raise ConfigError(f"{kind}: api is {spec.api!r}; wanted 1 or more (this shardcore knows {API_VERSION})")
    if spec.requires is None:
        return
    # Imported here because most specs have no requirement, and every plugin pays for what this module imports.
    from packaging.requirements import Requirement

    wanted = "a PEP 508 requirement like 'some-library>=5'"
    try:
        requirement = Requirement(spec.requires)
        if requirement.marker is not None:
            requirement.marker.evaluate()  # one that compares what cannot be compared parses all the same
    except Exception as error:
        raise ConfigError(f"{kind}: requires is {spec.requires!r}; wanted {wanted}") from error
    if requirement.url is not None or requirement.extras:
        raise ConfigError(f"{kind}: requires is {spec.requires!r}; wanted {wanted}, without extras and without a URL")


def is_reference(text: object) -> bool:
    """Return whether `text` is a string like `module:name`."""
    parts = str(text).split(":")
    return isinstance(text, str) and len(parts) == 2 and all(_is_dotted(part) for part in parts)


def _is_dotted(text: object, at_least: int = 1) -> bool:
    """Whether `text` is a string of so many Python names or more, joined by dots."""
    names = text.split(".") if isinstance(text, str) else []
    return len(names) >= at_least and all(name.isidentifier() for name in names)
