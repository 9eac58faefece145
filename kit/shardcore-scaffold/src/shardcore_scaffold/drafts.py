"""``shardcore new-pack``: a small model of the class that is meant, and the pack that is drafted from it."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError
from shardcore.plugins.isolation import attempt, in_one_line
from shardcore_scaffold import Draft, Example, write_pack
from shardcore_scaffold.checkpoints import configuration
from shardcore_scaffold.rounding import calmest
from shardcore_scaffold.small import Small, small_model
from shardcore_testing.islands import in_float64
from shardcore_testing.tiny_models import text_batch, tiny
from shardcore_transformers.models import meta_model, named_module


def new_pack(
    name: str, model: str | None, example: str | None, into: Path, *, checked: bool = False
) -> tuple[list[Path], Draft]:
    """Write a pack; return its files and what was drafted.

    Raises:
        ConfigError: as `shardcore_scaffold.write_pack`, or no small model could be built or called.
    """
    if (model is None) == (example is None):
        raise ConfigError("give --model for a class of transformers, or --example for any other, and not both")
    found = _of_transformers(model) if model is not None else _given(str(example))
    return write_pack(name, found, into, checked=checked)


_EXAMPLE = (
    "Write a function that returns a small model and the keyword arguments of a call, and give it as --example "
    "package.module:function"
)


@in_float64()
def _of_transformers(source: str) -> Example:
    empty = meta_model(source, default=configuration)
    cls = type(empty)
    if getattr(cls, "config_class", None) is None:
        raise ConfigError(
            f"{source} is no model of transformers, and it is not known how to call it; write a function that returns "
            "a small model and the keyword arguments of a call, and give it as --example package.module:function"
        )
    try:
        small = small_model(cls, empty.config, generating=True)
        if fields := _changed(small):
            config: Any = copy.deepcopy(empty.config)
            config.update(fields)
            small = small_model(cls, config, generating=True)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rstrip('.')}. {_EXAMPLE}") from error
    build = functools.partial(tiny, cls, **small.settings)
    try:
        std, tolerance = calmest(lambda std: build(dropout=0.0, std=std).train(), small.inputs)
    except Exception as error:
        raise ConfigError(f"{cls.__name__} was not trained with what its forward takes: {error}. {_EXAMPLE}") from error
    return Example(
        small.model,
        small.inputs,
        small.settings,
        unseen=unseen(empty, small.model),
        text=_is_text(small.model, small.inputs),
        live=_draws(build, small.inputs),
        std=std,
        tolerance=tolerance,
    )


def _changed(small: Small) -> dict[str, str]:
    """Return fields of a configuration that a model leaves behind at its first call: BigBird's, for a short text."""
    model, fields = copy.deepcopy(small.model), vars(small.model.config)
    with torch.no_grad():
        model(**small.inputs)
    after = dict(model.named_modules())
    return {
        name: getattr(after[path], name)
        for path, module in small.model.named_modules()
        for name in vars(module).keys() & fields.keys()
        if path in after and isinstance(vars(module)[name], str)
        if vars(module)[name] == fields[name] != getattr(after[path], name, fields[name])
    }


def unseen(whole: nn.Module, small: nn.Module) -> list[str]:
    """Return the modules of a model that its small copy has nothing like, with their classes; numbers do not count."""
    seen = {re.sub(r"\d+", "N", name) for name, _ in small.named_modules()}
    found: dict[str, str] = {}
    for name, module in whole.named_modules():
        if re.sub(r"\d+", "N", name) not in seen and not any(name.startswith(f"{above}.") for above in found):
            found[name] = type(module).__name__
    patterns = {re.sub(r"\d+", "{i}", name): kind for name, kind in found.items()}
    return [f"{name} ({kind})" for name, kind in patterns.items()]


def _given(source: str) -> Example:
    module, _, name = source.partition(":")
    try:
        function = getattr(named_module(module), name)
        model, inputs = attempt(function, source)
    except Exception as error:
        raise ConfigError(
            f"--example {source} gave nothing ({in_one_line(error)}); wanted package.module:function, which returns a "
            "small model and the keyword arguments of a call"
        ) from error
    if not isinstance(model, nn.Module) or not isinstance(inputs, Mapping):
        raise ConfigError(
            f"--example {source} returned a {type(model).__name__} and a {type(inputs).__name__}; wanted a model and a "
            "dict of arguments"
        )
    if missing := [p for p in ("seed",) if p not in inspect.signature(function).parameters]:
        raise ConfigError(
            f"{source} has no parameter {missing[0]!r}; it is called with seed=1, 2, ... for other arguments, and with "
            "dropout=0.1 for live dropouts"
        )
    live = _draws(lambda **options: function(seed=0, **options)[0].double(), inputs)
    return Example(model.double().eval(), inputs, source=source, live=live)


@in_float64()
def _draws(build: Callable[..., nn.Module], inputs: Mapping[str, Any]) -> bool:
    """Tell whether a model can be built with dropouts, and draws when it is called in training."""
    with torch.random.fork_rng(devices=()):
        try:
            model = build(dropout=0.5).train()
            before = torch.get_rng_state()
            model(**inputs)
        except Exception:  # it has none, or cannot be called in training: its tests say why
            return False
        return not torch.equal(before, torch.get_rng_state())


def _is_text(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Tell whether a model takes what `text_batch` makes for it, and has a loss of it if it has one of ``inputs``."""
    try:
        with torch.no_grad():
            losses = [_loss(model(**batch)) for batch in (inputs, text_batch(model, 0))]
    except Exception:
        return False
    return (losses[0] is None) == (losses[1] is None) and (losses[1] is None or bool(torch.isfinite(losses[1]).all()))


def _loss(out: Any) -> Any:
    return out.get("loss") if isinstance(out, Mapping) else None
