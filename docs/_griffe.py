"""How docstrings are read for the reference: the section "Options:" of parallel modules becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Options"]

_SECTION = re.compile(r"^Options:\n((?: {4}.*\n?)+)", re.MULTILINE)
_OPTION = re.compile(r"^ {4}(\w+): ", re.MULTILINE)


class Options(griffe.Extension):
    """Makes a Markdown list of "Options:", a section that griffe does not know."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of every object that has the section."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(_as_list, obj.docstring.value)


def _as_list(section: re.Match[str]) -> str:
    return "Options, which a row or `from_native_module` passes:\n\n" + _OPTION.sub(r"* `\1`: ", section[1])
