"""Models without weights: built on the meta device from a folder, a config.json or a class name.

A class name comes from the user, who says that it is to be imported. A file is data: what it names is looked up in
transformers and nowhere else, and code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardcore.errors import ConfigError
from shardcore.plugins.isolation import attempt, in_one_line

_HUB = re.compile(r"[\w.-]+/[\w.-]+")

#: A module and a class in it, which is no name of a model of the hub.
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

_NOT_CACHED = (
    "the local cache of the hub holds no config.json of a model of this name; no command asks the network. If it is "
    "one of the hub, fetch it first: hf download {} config.json"
)

_KINDS = "give a folder, a config.json, a class of transformers or package.module.Class"


def meta_model(source: str, *, default: Callable[[Any], Any] = lambda cls: cls.config_class()) -> nn.Module:
    """Return the model that ``source`` names, on the meta device, in its configuration's dtype; no weights are read.

    Args:
        source: a folder with a config.json, a config.json, the name of a model of the hub whose config.json is in the
            local cache (the network is not asked), or a class name: of transformers (built with its default
            configuration) or with its module, ``package.module.Class`` (called without arguments unless it is a
            transformers model).
        default: makes the configuration of a class of transformers that is named alone.

    Raises:
        ConfigError: there is no such thing, it cannot be built, the configuration names no model of transformers, or
            it needs code that comes with the checkpoint.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".json" or "/" in source:
        cls, config = _from_file(path)
    elif not _DOTTED.fullmatch(source) and (found := _in_the_cache_of_the_hub(source)) is not None:
        cls, config = _from_file(found)  # names such as gpt2
    else:
        cls = _class(source)
        config = None
    try:
        with torch.device("meta"):
            if config is None and getattr(cls, "config_class", None) is not None:
                config = default(cls)
            model: nn.Module = cls(config) if config is not None else cls()
        if isinstance(dtype := getattr(config, "dtype", None), torch.dtype):
            model.to(dtype)
    except Exception as error:
        raise ConfigError(
            f"{source}: {cls.__name__} could not be built: {type(error).__name__}: {error}. Give a folder or a "
            "config.json that fits the class, or a class that needs no arguments"
        ) from error
    return model


def named_module(name: str) -> ModuleType:
    """Import a module that the user named, also from the current folder, as ``python -m`` does.

    A name of the user's makes that folder one to import from, a file does not: what lies beside a checkpoint must not
    stand for a library.

    Raises:
        Exception: whatever the module raises.
    """
    here = str(Path.cwd())
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, here)
    return _imported(name)


def _imported(name: str) -> ModuleType:
    return attempt(lambda: importlib.import_module(name), name)


def _from_file(path: Path) -> tuple[Any, Any]:
    """Return the class and the configuration that a file describes."""
    file = path / "config.json" if path.is_dir() else path
    if not path.exists() and _HUB.fullmatch(str(path)) and path.suffix != ".json":
        cached = _in_the_cache_of_the_hub(str(path))
        if cached is None:
            raise ConfigError(
                f"{path}: there is no such folder, and the local cache of the hub holds no config.json of a model of "
                f"this name; no command asks the network. Fetch it first: hf download {path} config.json; or give a "
                "folder that holds the model's config.json"
            )
        file = cached
    if not file.is_file():
        raise ConfigError(f"{path}: there is no {'config.json in this folder' if path.is_dir() else 'such file'}")
    try:
        from transformers import AutoConfig
    except Exception as error:
        raise ConfigError(
            f"{file} is read by transformers, which is not installed or does not work ({in_one_line(error)}); install "
            "the model's pack, which brings it"
        ) from error
    data = _data(file)
    name = _architecture(file, data)
    try:
        config = AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except Exception as error:
        if "auto_map" in data:
            raise ConfigError(
                f"{file} needs code of its own (auto_map), which no command runs. Load the model in a program of "
                "yours, with the trust_remote_code=True of transformers if you trust that code, and give it to "
                "shardcore.shard; or install the code as a package, and name the class: package.module.Class"
            ) from error
        first = " ".join(str(error).split())[:300]
        raise ConfigError(f"transformers cannot read {file}: {type(error).__name__}: {first}") from error
    return _class_of_transformers(file, name), config


def _in_the_cache_of_the_hub(name: str) -> Path | None:
    """Return the config.json of a model of the hub, if an earlier download left it on this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except Exception:  # no such library, or no name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def _data(file: Path) -> dict[str, Any]:
    """Return what a config.json holds, after a look at what would run code if a model were built from it."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} is no configuration: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is no configuration: it holds a {type(data).__name__}, wanted an object")
    for key, value in _implementations(data):
        if "/" in value:
            raise ConfigError(
                f"{file} says {key}: {value!r}, which runs code from the hub, and no command does; remove that line, "
                "which changes nothing in how the model is sharded"
            )
    return data


def _implementations(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text that says how something is computed, at any depth, with its key."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _implementations(value, name if name.endswith("_implementation") else key)
    elif isinstance(data, list):
        for value in data:
            yield from _implementations(value, key)
    elif isinstance(data, str) and key:
        yield key, data


def _architecture(file: Path, data: dict[str, Any]) -> Any:
    names = data.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f'{file} names no architecture; add "architectures": ["LlamaForCausalLM"], or another')
    return names[0]


def _class_of_transformers(file: Path, name: Any) -> Any:
    """Return a class of transformers by its bare name; a name in a file imports nothing else."""
    found = _get("transformers", name) if isinstance(name, str) and name.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"{file} names the architecture {name!r}, which is no model class of transformers{_near(name)}; correct "
            "it, or give the class by its name: package.module.Class"
        )
    return found


def _class(name: str) -> Any:
    """Return the class that the user named."""
    given, _, short = name.rpartition(".")
    module = given or "transformers"
    try:
        found = getattr(named_module(given) if given else _imported(module), short)
    except Exception as error:
        where = f"module {given!r}" if given else "transformers"
        known = isinstance(error, AttributeError)  # the module is there: nothing more is to be said of it
        why = "" if known else f" ({in_one_line(error)})"
        near = _near(short, module)
        if not near and (known or given) and not _DOTTED.fullmatch(name):
            said = f"no class {name!r} in transformers, and {_NOT_CACHED.format(name)}; or {_KINDS}"
            raise ConfigError(said) from error
        raise ConfigError(f"no class {short!r} in {where}{why}{near or f'; {_KINDS}'}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"{name} is not a model class (a subclass of torch.nn.Module)")
    return found


def _get(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:
        return None


def _near(name: Any, module: str = "transformers") -> str:
    """Return a hint at the name in an imported module that was probably meant."""
    names = dir(sys.modules.get(module))
    near = difflib.get_close_matches(str(name), [n for n in names if n[:1].isupper()], n=1, cutoff=0.8)
    return f". Did you mean {near[0]!r}?" if near else ""
