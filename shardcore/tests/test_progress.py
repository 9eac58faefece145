from __future__ import annotations

import io
import threading

import pytest

from shardcore._progress import Progress


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


def test_the_line_says_what_and_how_much(monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := Stream(terminal=True))
    before = threading.active_count()
    with Progress(4000, "saving step-10") as progress:
        progress.advance(4000)
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("saving step-10: 100%")
    assert "4.00k/4.00k" in last
    assert last.endswith("\n")
    assert threading.active_count() == before


@pytest.mark.parametrize(("terminal", "shown"), [(False, True), (True, False)])
def test_silent(monkeypatch, terminal, shown):
    monkeypatch.setattr("sys.stderr", stream := Stream(terminal=terminal))
    with Progress(10, "saving", shown=shown) as progress:
        progress.advance(10)
    assert stream.getvalue() == ""


def test_without_a_standard_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress(10, "saving") as progress:
        progress.advance(10)
