"""How much of a model an inferred policy splits, which is said of the model itself and not of a small copy."""

from __future__ import annotations

import pytest

from shardcore.errors import ConfigError, ShardcoreWarning

transformers = pytest.importorskip("transformers")

from shardcore_scaffold import infer, inferred  # noqa: E402


def test_the_share_that_is_split_is_that_of_the_model_itself() -> None:
    config = transformers.StableLmConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=3, vocab_size=77)
    whole = sum(p.numel() for p in transformers.StableLmForCausalLM(config).parameters())
    found = infer.share(
        transformers.StableLmForCausalLM, config.to_json_string(), {"model.layers.N.mlp.up_proj.weight"}
    )
    assert found == pytest.approx(3 * 128 * 512 / whole)


def test_little_that_is_split_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    told = {"proof": "", "doubts": ["experts are left whole"]}
    with pytest.warns(ShardcoreWarning, match="splits only 79% of its parameters"):
        inferred._say("Net", {**told, "split": 0.799})
    inferred._say("Net", {**told, "split": 0.8})  # a warning would be an error
    first, _ = [record.getMessage().splitlines() for record in caplog.records]
    assert "splits 79% of this model's parameters; each rank holds the others whole (not proved)" in first[0]
    assert first[1] == "  - experts are left whole"


def test_what_would_split_nothing_is_refused() -> None:
    config = transformers.PoolFormerConfig().to_json_string(use_diff=False)
    with pytest.raises(ConfigError, match=r"nothing of a small PoolFormerModel could be split: .*no list of blocks"):
        infer.answer("transformers", "PoolFormerModel", config, proved=False)
