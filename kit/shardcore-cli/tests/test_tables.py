"""Tables at a terminal: they fit, names are folded at their seams, and only states have a colour."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from terminals import at_a_terminal

from shardcore_cli.checkpoints import _in_bytes
from shardcore_cli.tables import drawn, folded, say, show_table, widths, wrapped

CLASSES = "LlamaForCausalLM, LlamaForQuestionAnswering, Wav2Vec2ForAudioFrameClassification"
ROW = ["shard-llama 0.1.0", "loaded", CLASSES, "transformers >=4.57.6,<5.24 (5.23.0)"]
COLUMNS = ["distribution", "status", "serves", "tested with"]


def shown(columns, rows, width, *, colour=False):
    out = io.StringIO()
    console = Console(
        file=out, width=width, highlight=False, force_terminal=colour, color_system="standard" if colour else None
    )
    console.print(drawn("title", columns, rows, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_and_shows_every_sign(width):
    text = shown(COLUMNS, [ROW], width)
    assert max(map(len, text.splitlines())) <= width
    signs = [sign for sign in text if sign.isalnum()]
    for cell in (*COLUMNS, *ROW):
        assert sum(sign.isalnum() for sign in cell) <= len(signs)
    bare = "".join(signs)
    assert len(bare) == sum(sign.isalnum() for cell in ("title", *COLUMNS, *ROW) for sign in cell)


def test_names_are_folded_at_their_seams_only():
    assert folded("LlamaForQuestionAnswering", 16) == ["LlamaForQuestion", "Answering"]
    assert folded("model.layers.0.post_attention_layernorm", 20) == ["model.layers.0.post_", "attention_layernorm"]
    assert folded("transformers >=4.57.6,<5.24 (5.23.0)", 14) == ["transformers", ">=4.57.6,<5.24", "(5.23.0)"]
    assert folded("one\ntwo three", 5) == ["one", "two", "three"]
    # What has no seam is not cut.
    assert folded("accumulation", 4) == ["accumulation"]


def test_the_widest_column_does_not_pay_alone():
    assert widths([["check", "where"], ["accumulation", "step 1: model.embed_tokens.weight"]], 200) == [12, 33]
    narrow = widths([["check", "where"], ["accumulation", "step 1: model.embed_tokens.weight"]], 40)
    assert narrow[0] == 12
    assert sum(narrow) <= 40


def test_what_is_too_wide_is_turned_on_its_side():
    columns = [f"column{number}" for number in range(12)]
    text = shown(columns, [[str(n) for n in range(12)]], 60)
    assert max(map(len, text.splitlines())) <= 60
    (line,) = [line for line in text.splitlines() if "column11" in line]
    assert line.split()[1:4:2] == ["column11", "11"]
    both = [[f"value{n}{m}" for n in range(12)] for m in range(12)]
    text = shown(columns, both, 60)
    assert "column11: value1111" in text.splitlines()


def test_states_have_a_colour_and_names_have_none():
    text = shown(["check", "state"], [["a", "passed"], ["b", "failed"], ["model.3", "missing"]], 80, colour=True)
    assert "\x1b[32mpassed" in text
    assert "\x1b[1;31mfailed" in text
    assert "\x1b[33mmissing" in text
    assert text.count("\x1b[32m") == 1
    assert "\x1b[1;36m" not in text


def test_lines_end_between_words_and_keep_their_indent(capsys, monkeypatch):
    assert wrapped("    one two three", 12) == ["    one two", "    three"]
    assert wrapped("one two three", 8) == ["one two", "    three"]
    assert wrapped("transformers.models.llama", 8) == ["transformers.models.llama"]
    say("in a pipe there is one line, however long it is " * 3)
    assert len(capsys.readouterr().out.splitlines()) == 1
    at_a_terminal(monkeypatch, 30)
    say("at a terminal there are several lines\n\nand paragraphs")
    assert capsys.readouterr().out == "at a terminal there are\n    several lines\n\nand paragraphs\n"


@pytest.mark.parametrize(("state", "code"), [("yes", "\x1b[32m"), ("no", "\x1b[1;31m"), ("", "")])
def test_what_is_said_has_the_colour_of_its_state(capsys, monkeypatch, state, code):
    at_a_terminal(monkeypatch)
    say("it [fits]", state)
    assert capsys.readouterr().out == (f"{code}it [fits]\x1b[0m\n" if code else "it [fits]\n")
    monkeypatch.setenv("NO_COLOR", "1")
    say("it [fits]", state)
    assert "\x1b[32m" not in capsys.readouterr().out


def test_columns_to_spare_are_left_out_before_anything_is_folded(capsys, monkeypatch):
    columns, rows = ("mesh", "peak", "parameters"), [["tp 2 x dp 2", "16.1 GiB", "6.0 GiB"]]
    assert show_table("meshes", columns, rows, spare=1)
    assert capsys.readouterr().out == "mesh\tpeak\tparameters\ntp 2 x dp 2\t16.1 GiB\t6.0 GiB\n"
    at_a_terminal(monkeypatch, 30)
    assert not show_table("meshes", columns, rows, spare=1)
    narrow = capsys.readouterr().out
    assert "tp 2 x dp 2" in narrow
    assert "parameters" not in narrow
    at_a_terminal(monkeypatch, 60)
    assert show_table("meshes", columns, rows, spare=1)
    assert "parameters" in capsys.readouterr().out


def test_markup_in_a_cell_is_text():
    assert "[bold]x[/bold]" in shown(["a"], [["[bold]x[/bold]"]], 80)


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
    assert _in_bytes(count) == words
