"""What `shardcore packs` shows at a terminal: short, with no name in two parts; everything with -v."""

from __future__ import annotations

import pytest
from terminals import at_a_terminal, plain

from shardcore_cli.packs import show

CLASSES = [
    "transformers.models.deberta.modeling_deberta.DebertaForSequenceClassification",
    "transformers.models.deberta_v2.modeling_deberta_v2.DebertaV2ForTokenClassification",
    "transformers.models.deberta_v2.modeling_deberta_v2.DebertaV2ForQuestionAnswering",
    "timm.models.swin_transformer.SwinTransformer",
]


def row(name="deberta", **fields):
    tested = {"library": "transformers", "range": ">=5,<6", "installed": "5.1", "inside": True, "optional": False}
    return {
        "name": name,
        "distribution": f"shard-{name}",
        "version": "0.1.0",
        "location": f"/a/long/way/to/the/folder/of/all/packs/shard-{name}/src/shard_{name}/plugin.py",
        "status": "loaded",
        "error": None,
        "classes": CLASSES,
        "modules": [],
        "tested": [tested],
        **fields,
    }


@pytest.fixture
def shown(capsys, monkeypatch):
    def show_at(*rows, verbose=False):
        at_a_terminal(monkeypatch)
        show(list(rows), verbose=verbose)
        return plain(capsys.readouterr().out)

    return show_at


def test_a_pack_is_one_line(shown):
    text = shown(row(), row("other"))
    (line,) = [line for line in text.splitlines() if "shard-deberta" in line]
    assert line.split("│")[1:5] == [" shard-deberta 0.1.0 ", " loaded ", " 4       ", " deberta, deberta_v2, timm "]
    assert max(map(len, text.splitlines())) <= 80
    assert "shardcore packs -v" in text


def test_a_name_that_cannot_be_guessed_is_there(shown):
    for verbose in (False, True):
        assert "else-where 0.1.0 (mine)" in shown(row("mine", distribution="else-where"), verbose=verbose)


def test_what_is_wrong_is_below(shown):
    old = {"library": "torch", "range": "<2", "installed": "2.9", "inside": False, "optional": False}
    text = shown(row(status="broken", error="RuntimeError: no luck", classes=[]), row("old", tested=[old]))
    assert "shard-deberta: RuntimeError: no luck" in text.splitlines()
    assert "shard-old: tested with torch <2 (2.9, outside)" in text.splitlines()


def test_verbose_shows_every_name_in_one_part(shown):
    text = shown(row(), verbose=True)
    lines = text.splitlines()
    words = {word.strip(",") for line in lines for word in line.split()}
    assert {name.rpartition(".")[2] for name in CLASSES} <= words
    assert row()["location"] in words
    assert "transformers >=5,<6 (5.1)" in text
    assert max(len(line) for line in lines if row()["location"] not in line) <= 80
