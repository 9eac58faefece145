"""Models without weights: built on the meta device from a folder, a config.json or a class name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError

__all__ = ["meta_model"]


def meta_model(source: str) -> nn.Module:
    """Return the model that ``source`` names, on the meta device; no weights are read.

    Args:
        source: a folder with a config.json, a config.json, or a class name: of transformers (built with its default
            configuration) or with its module, ``package.module.Class`` (called without arguments unless it is a
            transformers model).

    Raises:
        ConfigError: there is no such thing, it cannot be built, or the configuration names no architecture.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".json" or "/" in source:
        cls, config = _from_file(path)
    else:
        cls = _class(source)
        config = None
    try:
        with torch.device("meta"):
            if config is None and (config_class := getattr(cls, "config_class", None)) is not None:
                config = config_class()
            model: nn.Module = cls(config) if config is not None else cls()
    except Exception as error:
        raise ConfigError(
            f"{source}: {cls.__name__} could not be built: {type(error).__name__}: {error}. Give a folder or a "
            "config.json that fits the class, or a class that needs no arguments"
        ) from error
    return model


def _from_file(path: Path) -> tuple[Any, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: there is no {'config.json in this folder' if path.is_dir() else 'such file'}")
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"{file} is read by transformers, which is not installed; install the model's pack"
        ) from error
    try:
        config = AutoConfig.from_pretrained(str(file))
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise ConfigError(f"transformers cannot read {file}: {type(error).__name__}: {first}") from error
    names = getattr(config, "architectures", None)
    if not names:
        raise ConfigError(f'{file} names no architecture; add "architectures": ["LlamaForCausalLM"], or another')
    return _class(names[0]), config


def _class(name: str) -> Any:
    module, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "transformers"), short)
    except (ImportError, AttributeError) as error:
        where = f"module {module!r}" if module else "transformers"
        raise ConfigError(
            f"no class {short!r} in {where} ({error}); give a folder, a config.json, a class of transformers or "
            "package.module.Class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"{name} is not a model class (a subclass of torch.nn.Module)")
    return found
