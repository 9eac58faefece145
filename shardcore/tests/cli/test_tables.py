"""Tables at a terminal: they fit, names are folded at their seams, and only states have a colour."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardcore.cli.tables import drawn, folded, widths

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


def test_markup_in_a_cell_is_text():
    assert "[bold]x[/bold]" in shown(["a"], [["[bold]x[/bold]"]], 80)
