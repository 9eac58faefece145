"""What `shardcore inspect` says about a training checkpoint."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardcore
from shardcore_cli import main


class Net(nn.Module):
    """Two tied names, and a plain weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.other.weight = self.one.weight


def saved(folder):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model.last(model.other(model.one(torch.ones(1, 3)))).sum().backward()
    optimizer.step()
    return shardcore.save_checkpoint(folder, model, optimizer, step=4, extra={"note": [1, 2]})


def inspect(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def test_what_is_in_it_as_json(tmp_path):
    path = saved(tmp_path)
    done = inspect(tmp_path, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["path"] == str(path)
    assert (found["step"], found["ranks"], found["mesh"], found["extra"]) == (4, 1, {}, {"note": [1, 2]})
    assert found["model"] == f"{Net.__module__}.Net"
    assert found["config"] is None
    assert found["libraries"] == {"torch": torch.__version__, "shardcore": shardcore.__version__}
    assert found["installed"].keys() == found["libraries"].keys()
    assert found["installed"]["torch"] == torch.__version__
    assert found["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "shardcore.json")
    tensors = {row["name"]: row for row in found["tensors"]}
    weight = tensors["model.one.weight"]
    assert (weight["shape"], weight["dtype"], weight["bytes"], weight["same_as"]) == ([3, 3], "float32", 36, None)
    assert all((path / file).exists() for file in weight["files"])
    assert weight["files"]
    assert tensors["model.other.weight"]["same_as"] == "model.one.weight"
    assert tensors["optimizer.state.last.bias.exp_avg"]["shape"] == [2]
    assert found["optimizer"]["class"] == "AdamW"
    (group,) = found["optimizer"]["groups"]
    assert (group["parameters"], group["options"]["lr"]) == (4, 0.5)


def test_what_is_in_it_as_text(tmp_path):
    path = saved(tmp_path)
    done = inspect(path)
    assert done.exit_code == 0, done.output
    assert f"{path}: step 4, " in done.stdout
    assert "saved by 1 ranks (no mesh), torch " in done.stdout
    assert "model.one.weight\t3x3\tfloat32\t36 B\t__0_0.distcp" in done.stdout
    assert "model.other.weight\t3x3\tfloat32\t36 B\t= model.one.weight" in done.stdout
    assert "AdamW, group 0: 4 parameters, lr 0.5, " in done.stdout
    assert "extra: {'note': [1, 2]}" in done.stdout


def test_versions_that_are_not_installed_here(tmp_path):
    index = saved(tmp_path) / "shardcore.json"
    text = json.loads(index.read_text())
    del text["checksums"]  # of one that is changed by hand
    text["about"]["libraries"] = {"shard-none": "0.7", "click": "0.1"}
    index.write_text(json.dumps(text))
    click = importlib.metadata.version("click")
    done = inspect(tmp_path)
    assert done.exit_code == 0, done.output
    assert f"torch {torch.__version__}, shard-none 0.7 (here none), click 0.1 (here {click})\n" in done.stdout
    assert json.loads(inspect(tmp_path, "--json").stdout)["installed"]["shard-none"] is None


def wrapped(folder):
    model = fully_shard(Net())
    shardcore.save_checkpoint(folder, model, step=0)
    return type(model).__name__


def test_the_class_is_the_one_that_the_user_knows(pool, tmp_path):
    assert pool.run(wrapped, str(tmp_path), world=2) == ["FSDPNet"] * 2
    assert json.loads(inspect(tmp_path, "--json").stdout)["model"] == f"{Net.__module__}.Net"


def test_no_checkpoint(tmp_path):
    done = inspect(tmp_path)
    assert done.exit_code == 1
    assert f"error: {tmp_path} holds no complete checkpoint, and is none" in done.output


def test_a_checkpoint_that_is_not_complete(tmp_path):
    path = saved(tmp_path)
    next(path.glob("*.distcp")).unlink()
    convert = ["convert", str(path), str(tmp_path / "out")]
    converts = importlib.util.find_spec("huggingface_hub") is not None
    for command in (["inspect", str(path)], *([convert] if converts else [])):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 1
        assert f"error: checkpoint {path} cannot be loaded: " in done.output
    assert not (tmp_path / "out").exists()
