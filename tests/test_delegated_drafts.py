"""Drafts that leave the models inside of a model to the packs that serve them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from shardcore_scaffold import Example, infer, proof, write_pack  # noqa: E402
from shardcore_scaffold.facts import Facts  # noqa: E402
from shardcore_scaffold.guess import guess  # noqa: E402
from shardcore_scaffold.small import small_model  # noqa: E402
from shardcore_testing.findings import Finding  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


class Turned(transformers.LlamaModel):
    """Computes something else than the class that a pack serves."""

    def forward(self, **inputs):
        return super().forward(**inputs).last_hidden_state.flip(-1)


class Ranking(nn.Module):
    """Two models inside, one of which no call reaches, and what a pack knows nothing of."""

    def __init__(self, kind: type[nn.Module], other: type[nn.Module]) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**SIZES)
        self.reader, self.other, self.rank = kind(config), other(config), nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        read = self.reader(input_ids=ids)
        return self.rank(read if isinstance(read, torch.Tensor) else read.last_hidden_state)


def _drafted(model: nn.Module, **options: bool):
    ids = torch.arange(1, 11).view(2, 5)
    return guess(Facts(model, lambda model: model(ids)), **options)


def test_a_model_inside_is_left_to_its_pack(tmp_path) -> None:
    model = Ranking(transformers.LlamaModel, transformers.LlamaModel).double()
    draft = _drafted(model)
    assert draft.rows == {"Ranking": ['delegate("reader"),', 'delegate("other"),', 'replicate("rank"),']}
    assert draft.packs == {"shard-llama"}
    assert draft.sequence
    assert draft.stages == {"blocks": ["reader", "other"], "last": ["rank"]}
    files, _ = write_pack("shard-ranking", Example(model=model, inputs={"ids": torch.ones(1, 4).long()}), tmp_path)
    assert '"shard-llama"' in next(file.read_text() for file in files if file.name == "pyproject.toml")
    assert not _drafted(model, delegated=False).packs


@pytest.mark.parametrize(("kind", "left"), [(Turned, []), (transformers.LlamaModel, ['delegate("reader"),'])])
def test_what_computes_something_else_or_is_never_called_is_not(kind, left) -> None:
    draft = _drafted(Ranking(kind, transformers.MistralModel).double())
    assert [rule for rule in draft.rows["Ranking"] if rule.startswith("delegate")] == left


def test_who_drafts_for_a_class_with_a_pack_gets_another_policy() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    assert "LlamaDecoderLayer" in _drafted(model).rows


@pytest.mark.parametrize("differs", ["training", "sequence"])
def test_what_does_not_hold_around_a_pack_is_found_out_anew(monkeypatch, differs: str) -> None:
    drafts: list[str] = []

    def examined(pool, subject, section, **options) -> list[Finding]:
        drafts.append(subject.case.policy)
        state = "failed" if section == differs and len(set(drafts)) == 1 else "passed"
        return [Finding(check=section, state=state, message="differs")]

    monkeypatch.setattr(proof, "examine", examined)
    config = small_model(transformers.EncoderDecoderModel).model.config.to_json_string(use_diff=False)
    first = infer.answer("transformers", "EncoderDecoderModel", config, proved=False)
    assert "delegate(" in first["source"]
    told = infer.answer("transformers", "EncoderDecoderModel", config, proved=True)
    assert "delegate(" not in told["source"]
    assert told["proof"]
