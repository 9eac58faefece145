"""What a new pack may be called, and what of a model can be written into its files."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys

from torch import nn

from shardcore.errors import ConfigError
from shardcore.plugins.unserved import first_party
from shardcore.plugins.versions import installed

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

# Names of files and folders may have 255 letters, and the longest has some letters more than the pack's.
_LONGEST = 80

_PART = re.compile(r"\w+")


def check_name(name: str) -> None:
    """Refuse a name under which a pack could not be installed, imported or told from another.

    Raises:
        ConfigError: says why, and what would work.
    """
    package = name.replace("-", "_")
    if len(name) > _LONGEST:
        problem = f"has {len(name)} letters; wanted at most {_LONGEST}"
    elif not _NAME.fullmatch(name):
        problem = "is no name of a distribution: lower-case letters, digits and single hyphens"
    elif keyword.iskeyword(package):
        problem = "is a word of Python, so that nothing of that name can be imported"
    elif name in first_party():
        problem = "is the name of a pack of this project, whose place it would take"
    elif _importable(package):
        problem = f"would be imported as {package}, and something of that name can be imported here already"
    elif installed(name) is not None:
        problem = "is installed here already, and would be replaced"
    else:
        return
    shown = name if len(name) <= _LONGEST else f"{name[:20]}..."
    raise ConfigError(f"the name {shown!r} {problem}. Choose another one, such as shard-stablelm")


def _importable(package: str) -> bool:
    if package in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # imported, in an unusual way
        return True


def check_model(model: nn.Module) -> None:
    """Refuse a model whose names cannot be written into the files of a pack.

    Raises:
        ConfigError: names the first one.
    """
    for cls in (type(model), type(getattr(model, "config", None))):
        _check(f"{cls.__module__}.{cls.__name__}", "module and name of a class", cls.__module__.split("."))
        _check(cls.__qualname__, "name of a class inside of another", [cls.__qualname__])
    for path, module in model.named_modules():
        _check(type(module).__name__, "name of a class", [type(module).__name__])
        parts = [part for name in (path, *module._parameters) for part in name.split(".") if part]
        if odd := next((part for part in parts if not _PART.fullmatch(part)), None):
            _check(odd, "name in the model", [odd])


def _check(name: str, what: str, parts: list[str]) -> None:
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise ConfigError(f"{name!r} is the {what}, which cannot be written into a program; rename it")
