"""The page of the census says what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import census  # noqa: E402  # from tools/
from census_page import page  # noqa: E402  # from tools/

WAYS = {
    "sequence": "exact",
    "pipeline": "refused: A has | one block",
    "lazy": "failed: KeyError",
    "save": "",
    "generate": "",
}
EXACT = {
    "class": "A",
    "state": "exact",
    "way": "inferred",
    "error": 3e-15,
    "split": 0.9,
    "attention": 1.0,
    "ways": WAYS,
    "blocks": True,
}
PACKED = {**EXACT, "class": "B", "way": "llama", "attention": None, "blocks": False}
REFUSED = {"class": "C", "state": "refused", "way": "inferred", "reason": "nothing | could\nbe `split`", "blocks": None}


def test_a_row_for_each_class_and_the_totals() -> None:
    text = page({each["class"]: each for each in (REFUSED, PACKED, EXACT)}, missing=4, release="5.0")
    assert "| `A` | inferred | 3e-15 | 0.90 | 1.00 | yes | no | **failed** |  |  |\n" in text
    assert "| `B` | llama | 3e-15 | 0.90 |  | yes | no | **failed** |  |  |\n" in text
    assert "| pipeline | 1 | `A` | `refused: it has / one block` |" in text
    assert "sequence 2 of 2 (0 differ), pipeline 0 of 2 (0 differ)" in text
    assert "| `C` | inferred | refused | `nothing / could be split` |" in text
    assert "Of 7 classes 3 were measured: 2 are exact, 0 differ, 1 are refused" in text
    assert (
        "4 were not reached. Of the 2 exact ones 1 have no pack; of the 1 with attention modules 1 (100%) have" in text
    )
    assert "2 of the classes have a transformer's blocks" in text
    assert "Of these 50.0% are exact: 1 are exact, 0 differ, 1 are refused" in text


def test_the_totals_of_another_release() -> None:
    older = {"A": {**EXACT, "release": "4.9", "ways": {}}}
    text = page({"A": EXACT}, missing=0, release="5.0", also=older)
    said = text.partition("With transformers 4.9: ")[2].partition("\n\n")[0]
    assert said.startswith("Of 1 classes 1 were measured: 1 are exact, 0 differ; 0 were not reached.")
    assert "further ways" not in said


def test_the_newest_result_of_a_class_counts(tmp_path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(f"{json.dumps({**EXACT, 'state': state})}\n" for state in ("failed", "exact")))
    assert census.read(file)["A"]["state"] == "exact"
    assert census.read(tmp_path / "none") == {}


def test_a_class_that_ends_is_told_from_one_that_takes_too_long() -> None:
    def dies() -> dict[str, object]:
        import os

        os._exit(3)

    def sleeps() -> dict[str, object]:
        import time

        time.sleep(60)
        return {}

    assert census._Child(dies).answer(30)["reason"] == "the process died"
    assert census._Child(sleeps, leads=True).answer(0.2)["reason"] == "took more than 0 s"
    assert "ZeroDivisionError" in census._Child(lambda: {"x": 1 / 0}).answer(30)["reason"]


def test_what_has_the_blocks_of_a_transformer() -> None:
    transformers = census.transformers
    names = ("LlamaForCausalLM", "MambaForCausalLM", "ResNetModel", "TimmWrapperModel")
    assert [census.has_blocks(getattr(transformers, name)) for name in names] == [True, True, False, None]


def test_first_is_a_class_of_each_type_that_has_a_plan_and_no_pack() -> None:
    kinds = census.classes()
    names = list(kinds)
    assert (
        names.index("ExaoneMoeForCausalLM")
        < names.index("LlamaForCausalLM")
        < names.index("LlamaForTokenClassification")
    )
    assert len(set(map(kinds.get, names[:100]))) == 100


@pytest.mark.parametrize(("error", "state"), [(5e-6, "random"), (5e-4, "differs")])
def test_a_model_of_rounding_alone_is_random_as_far_as_its_own_gradients_change(monkeypatch, error, state) -> None:
    def answered(rank, compared):
        return {"state": "differs", "error": error, "rank": rank}

    monkeypatch.setattr(census, "answer_of_rank", answered)
    monkeypatch.setattr(census, "change_of_gradients", lambda model, inputs: 1e-6)
    model = nn.Linear(2, 2).double()
    found = census.on_ranks(model, {"input": torch.ones(3, 2, dtype=torch.float64)}, None)
    assert found["state"] == state
