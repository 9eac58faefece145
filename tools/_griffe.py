"""How docstrings are read for the reference."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import griffe

__all__ = ["Inherited", "Options"]

# A warning of this logger is an error of `mkdocs build --strict`.
log = logging.getLogger("mkdocs.plugins.shardcore")

_SECTION = re.compile(r"^Options:\n((?: {4}.*\n?)+)", re.MULTILINE)
_OPTION = re.compile(r"^ {4}(\w+): ", re.MULTILINE)


class Options(griffe.Extension):
    """Makes a Markdown list of "Options:", a section of parallel modules that griffe does not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of every object that has the section."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(_as_list, obj.docstring.value)


def _as_list(section: re.Match[str]) -> str:
    return "Options, which a rule or `from_native_module` passes:\n\n" + _OPTION.sub(r"* `\1`: ", section[1])


class Inherited(griffe.Extension):
    """Gives an override without a docstring that of what it overrides, as `help` does."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Look at every member of every class, once all of them are read."""
        for cls in _classes(pkg):
            for name, member in cls.members.items():
                if member.is_alias or member.docstring is not None or name.startswith("_"):
                    continue
                overridden = (base.members[name] for base in cls.mro() if name in base.members)
                member.docstring = next((m.docstring for m in overridden if m.docstring is not None), None)
                if member.docstring is None and isinstance(member, griffe.Function) and _overrides(member):
                    log.warning("%s overrides a method, and neither has a docstring", member.path)


def _overrides(function: griffe.Function) -> bool:
    return any(str(decorator.value) == "override" for decorator in function.decorators)


def _classes(room: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    for member in room.members.values():
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Class | griffe.Module):
            yield from _classes(member)
