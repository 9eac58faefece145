"""Models without a checkpoint: built without memory, and initialised part by part with the values of their own code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from shardcore.agree.agreement import Report, agreement
from shardcore.apply.errors import out_of_inference_mode, refuse_broken, together
from shardcore.errors import ConfigError, NoPolicyError
from shardcore.mesh.axes import group_of
from shardcore.mesh.context import nearest_context
from shardcore.plugins.registry import default_registry
from shardcore.policy import Policy
from shardcore.weights.lazy import recording
from shardcore.weights.materialize import materialize, to_meta
from shardcore.weights.recipes import Recipe, constant

Model = TypeVar("Model", bound=nn.Module)

_BUILD = "_shardcore_build"


def on_meta(build: Callable[..., Model], *args: object, **kwargs: object) -> Model:
    """Return ``build(*args, **kwargs)`` with its parameters on the meta device, whatever their size.

    ```python
    model = shardcore.on_meta(MyModel, layers=80)
    model = shardcore.shard(model, tp=8, policy=MyPolicy)
    shardcore.initialize(model, seed=0)                    # or: shard(model, ..., weights="model.safetensors")
    ```

    Unlike under ``torch.device("meta")``, buffers are real, and `initialize` knows how the parameters come about.

    Args:
        build: makes the model: a class, or any function; it may be called again with the same arguments.
        *args: its positional arguments.
        **kwargs: its keyword arguments.
    """
    with recording(seed=0):
        model = build(*args, **kwargs)
    to_meta(model)
    model.__dict__[_BUILD] = functools.partial(build, *args, **kwargs)
    return model


def initialize(model: Model, seed: int = 0, *, build: Callable[[], nn.Module] | None = None) -> Model:
    """Give a sharded model that was built on the meta device the values of its native initialisation; return it.

    ```python
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = shardcore.shard(model, tp=8)
    shardcore.initialize(model, seed=0)
    ```

    The values follow from ``seed`` and the code of the model alone: they are the same on any mesh, also without one.
    The model is built once more with recorded operations in the place of memory; then each parameter's operations are
    carried out, and this rank keeps its part. One full parameter is there at a time. Every rank makes the call. After
    deferred initialisation (torchdistX).

    Args:
        model: the model, sharded before; what has values already is initialised too.
        seed: of all random numbers; the same on every rank.
        build: returns a new, unsharded model like it. Not needed for models whose policy knows how (`Policy.builder`)
            and for those that `on_meta` built.

    Raises:
        ConfigError: nobody knows how the model is built, or ``build`` makes another one.
        AgreementError: another rank failed, or has another seed; nothing was changed.
        PartlyShardedError: a rank failed after models were changed; they are unusable on all ranks.
    """
    context = nearest_context(model)
    group = None if context is None else group_of(context.mesh)
    with agreement(group=group) as own:
        own.report = Report(items=(("initialize(seed=)", str(seed)), ("the model", type(model).__qualname__)))
        refuse_broken(model)
        recipes = _recipes(model, seed, build or _builder(model))
    with out_of_inference_mode(), together(model, group=group, doing="initialising", changing=True):
        materialize(model, recipes, context, f"initialising {type(model).__name__}")
    return model


def _builder(model: nn.Module) -> Callable[[], nn.Module]:
    """Return what builds a new model like ``model``."""
    build: Callable[[], nn.Module] | None = model.__dict__.get(_BUILD)
    if build is not None:
        return build
    with contextlib.suppress(NoPolicyError):
        policy: Policy = default_registry().resolve(type(model)).load()()
        build = policy.builder(model)
    if build is None:
        raise ConfigError(
            f"initialize: nobody knows how this {type(model).__name__} was built. Build it with "
            "shardcore.on_meta(MyModel, ...), or pass initialize(model, build=lambda: MyModel(...))"
        )
    return build


def _recipes(model: nn.Module, seed: int, build: Callable[[], nn.Module]) -> dict[str, Recipe]:
    """Return how the parameters and buffers of ``model`` come about."""
    with recording(seed):
        new = build()
    recipes = to_meta(new)
    for name, buffer in new.named_buffers(remove_duplicate=False):
        recipes[name] = constant(buffer)
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in wanted.items():
        found = recipes.get(name)
        if found is None and not tensor.is_meta:
            continue
        if found is None or found.shape != tuple(tensor.shape):
            raise ConfigError(
                f"initialize: build made a {type(new).__name__} whose {name} is "
                f"{'not there' if found is None else found.shape}, and in this {type(model).__name__} it is "
                f"{tuple(tensor.shape)}; it has to build a model like this one"
            )
    return recipes
