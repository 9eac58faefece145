"""Standard streams that say they are a terminal."""

from __future__ import annotations

import re
import sys

import pytest


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 80) -> None:
    """Make the captured streams those of a terminal of some width; call it with ``capsys`` in use."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text: str) -> str:
    """Return text without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)
