"""How much of a model an inferred policy splits, which is said of the model itself and not of a small copy."""

from __future__ import annotations

import pytest
import torch

from shardcore.errors import ConfigError, ShardcoreWarning

transformers = pytest.importorskip("transformers")

from shardcore_scaffold import infer, inferred  # noqa: E402


def test_the_share_that_is_split_is_that_of_the_model_itself() -> None:
    config = transformers.StableLmConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=3, vocab_size=77)
    whole = sum(p.numel() for p in transformers.StableLmForCausalLM(config).parameters())
    found, parts = infer.shares(
        transformers.StableLmForCausalLM, config.to_json_string(), {"model.layers.N.mlp.up_proj.weight"}
    )
    assert found == pytest.approx(3 * 128 * 512 / whole)
    assert list(parts) == [
        "model.layers.N.mlp.gate_proj",
        "model.layers.N.mlp.down_proj",
        "model.layers.N.self_attn.q_proj",
    ]
    assert parts["model.layers.N.mlp.down_proj"] == pytest.approx(3 * 128 * 512 / whole)


def test_little_that_is_split_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    told = {"proof": "", "doubts": ["experts are left whole"], "whole": {"layers.N.experts": 0.191}}
    with pytest.warns(ShardcoreWarning, match=r"splits only 79% of its parameters: .* whole \(layers.N.experts: 19%\)"):
        inferred._say("Net", {**told, "split": 0.799})
    inferred._say("Net", {**told, "split": 0.8})  # a warning would be an error
    first, _ = [record.getMessage().splitlines() for record in caplog.records]
    assert "splits 79% of this model's parameters; each rank holds the others whole (not proved)" in first[0]
    assert first[1] == "  - experts are left whole"


def test_less_than_a_half_is_taken_on_request(monkeypatch) -> None:
    source = "class LinearPolicy: pass"
    told = {"proof": "all", "doubts": [], "split": 0.49, "whole": {"experts": 0.4}, "source": source}
    monkeypatch.setattr(inferred, "_asked", lambda *how: told)
    model = torch.nn.Linear(2, 2)
    said = r"splits only 49% of its parameters: .* \(experts: 40%\)\. .*; or take it as it is: infer='proved_in_part'"
    with pytest.raises(ConfigError, match=said):
        inferred.inferred(model, "proved", None)
    with pytest.warns(ShardcoreWarning, match="splits only 49%"):
        assert inferred.inferred(model, "proved_in_part", None).__name__ == "LinearPolicy"


def test_what_would_split_nothing_is_refused() -> None:
    config = transformers.PoolFormerConfig().to_json_string(use_diff=False)
    with pytest.raises(ConfigError, match=r"nothing of a small PoolFormerModel could be split: .*no list of blocks"):
        infer.answer("transformers", "PoolFormerModel", config, proved=False)
