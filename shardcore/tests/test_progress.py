from __future__ import annotations

import io

import pytest

from shardcore._progress import Progress, in_bytes


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1534, "1.53 kB"),
        (999_600, "1 MB"),
        (25e9, "25 GB"),
        (1e18, "1e+03 PB"),
    ],
)
def test_bytes_in_words(count, words):
    assert in_bytes(count) == words


def test_the_line_says_how_much_how_fast_and_what_remains():
    stream, clock = Terminal(), Clock()
    with Progress(4000, "saving", stream=stream, clock=clock) as progress:
        clock.now += 0.1
        progress.advance(500)
        assert stream.getvalue() == ""  # too soon
        clock.now += 0.9
        progress.advance(500)
        assert stream.getvalue() == "\rsaving: 1 kB of 4 kB, 1 kB/s, 3 s left"
        clock.now += 1
        progress.advance(3000)
    progress.close()
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    before, last, _ = text[:-1].split("\r")[1:]
    assert last.rstrip() == "saving: 4 kB of 4 kB, 2 kB/s"
    assert len(last) == len(before)  # nothing of the longer line stays


def test_a_failure_ends_the_line():
    stream = Terminal()
    with pytest.raises(OSError, match="full"), Progress(10, "saving", stream=stream, clock=Clock()):
        raise OSError("full")
    assert stream.getvalue() == "\rsaving: 0 B of 10 B\n"


@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO(), True), (Terminal(), False)])
def test_silent(stream, shown):
    clock = Clock()
    with Progress(10, "saving", shown=shown, stream=stream, clock=clock) as progress:
        clock.now += 5
        progress.advance(10)
    assert stream.getvalue() == ""
    assert progress.done == 10


def test_without_a_standard_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress(10, "saving") as progress:
        progress.advance(10)
