"""Cases of drafts: what makes a model small, its dropouts, its random parameters, and the rows of its policy."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from shardcore_testing.tiny_models import randomized, tiny

transformers = pytest.importorskip("transformers")

from shardcore_scaffold.cases import Example, cases  # noqa: E402
from shardcore_scaffold.draft import Draft, lines  # noqa: E402
from shardcore_scaffold.facts import Facts  # noqa: E402
from shardcore_scaffold.guess import guess  # noqa: E402
from shardcore_scaffold.rounding import calmest  # noqa: E402
from shardcore_scaffold.small import small_model  # noqa: E402


def test_the_case_of_a_head_compares_what_it_returns() -> None:
    small = small_model(transformers.ElectraForQuestionAnswering)
    found = guess(Facts(small.model, lambda model: model(**small.inputs)))
    text = cases("electra", Example(small.model, small.inputs, small.settings, text=True), found)
    assert "return text_batch(model, seed)" in text
    assert 'outputs=("start_logits", "end_logits")' in text


def test_no_setting_is_a_dropout_and_every_dropout_is_set() -> None:
    given = transformers.ElectraConfig.from_dict({"transformers_version": "5.0.0", "classifier_dropout": None})
    small = small_model(transformers.ElectraForTokenClassification, given)
    found = guess(Facts(small.model, lambda model: model(**small.inputs)))
    text = cases("electra", Example(small.model, small.inputs, small.settings, std=0.1), found)
    assert "transformers_version" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert not [name for name in small.settings if "drop" in name]
    assert "tiny(ElectraForTokenClassification, dropout=dropout, std=0.1, **{**SETTINGS, **options})" in text
    config = tiny(transformers.ElectraForTokenClassification, dropout=0.25, **small.settings).config
    assert (config.classifier_dropout, config.hidden_dropout_prob) == (0.25, 0.25)


def test_dropouts_of_configurations_inside_are_set() -> None:
    config = tiny(transformers.CLIPModel, dropout=0.25, **small_model(transformers.CLIPModel).settings).config
    assert config.text_config.attention_dropout == config.vision_config.attention_dropout == 0.25


def test_random_parameters_are_small_where_rounding_grows() -> None:
    def build(std: float, depth: int) -> nn.Module:
        return randomized(nn.Sequential(*(nn.Linear(48, 48) for _ in range(depth))), std=std)

    inputs = {"input": torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 48)}
    assert calmest(functools.partial(build, depth=1), inputs) == (0.2, 1e-12)

    class Growing(nn.Module):
        def __init__(self, std: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((48,), std, dtype=torch.float64))

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # as that of the sequence
            return (self.weight * input * 1e9).sin()

    std, tolerance = calmest(Growing, inputs)
    assert std == 0.05
    assert tolerance == 1e-8  # more would hide mistakes


def test_rows_that_say_the_same_are_one() -> None:
    found = Draft()
    for name in ("one", "two"):
        found.add("Block", "replicate", f'replicate("{name}"),')
        found.add("Block", "norm", f'norm("{name}", rms="eps"),')
    found.add("Block", "replicate", 'replicate("three", optional=True),')
    wanted = 'replicate("one", "two"), norm("one", "two", rms="eps"), replicate("three", optional=True)'
    assert list(lines(found)) == ["return {", f'    "Block": [{wanted}],', "}"]
    for number in range(20):
        found.add("Block", "replicate", f'replicate("a_longer_name.{number}"),')
    assert max(map(len, lines(found))) <= 112
    assert "".join(lines(found)).count("a_longer_name") == 20
