"""What is said where no policy could be inferred."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardcore.errors import ConfigError
from shardcore_scaffold import inferred as module
from shardcore_scaffold.infer import loss_of


class Text(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.table = config, nn.Embedding(4, 2)


class WithImages(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.config = SimpleNamespace(text_config=object())
        self.text, self.head = Text(self.config.text_config), nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.text.table.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_part_is_named_where_it_can_be_sharded(monkeypatch, tied):
    """`shard` refuses one whose table is tied to a head outside of it."""
    monkeypatch.setattr(module, "_asked", lambda *how: {"error": "none"})
    with pytest.raises(ConfigError) as raised:
        module.inferred(WithImages(tied), "proved", None)
    assert ("shardcore.shard(model.text, ...)" in str(raised.value)) is not tied


def test_a_class_of_the_script_that_runs_cannot_be_imported(monkeypatch):
    class_of_script = type("Script", (Text,), {"__module__": "__main__", "config_class": SimpleNamespace})
    with pytest.raises(ConfigError, match=r"cannot import Script: .* Put it into a module"):
        module.inferred(class_of_script(SimpleNamespace()), "proved", None)


def test_the_loss_of_a_small_copy_is_its_own_or_made_of_what_it_returned():
    scores, total = torch.arange(6.0).view(2, 3), torch.tensor(7.0)
    assert loss_of({"loss": total, "scores": scores}) is total
    assert loss_of((scores, None)) == loss_of({"loss": None, "scores": scores}) == loss_of(scores) != 0


def test_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SHARDCORE_PACKS", "vit")
    handed = module._of_a_child(["", "/first", "/second"])
    assert handed["PYTHONPATH"] == "/first:/second"
    assert handed["SHARDCORE_PACKS"] == "vit"
    assert not [name for name in handed if "RANK" in name or "PROCID" in name or name.startswith("TORCHELASTIC")]
