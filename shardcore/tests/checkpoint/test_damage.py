"""What was changed on the disk after it was saved is noticed when it is loaded."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from trainings import Training, said, whole

import shardcore
from shardcore.checkpoint import Checkpoint
from shardcore.errors import CheckpointError

WIDTH = 40  # its part is larger than what DCP writes around it


def trained(seed=0, steps=1):
    torch.manual_seed(seed)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for _ in range(steps):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    return model, optimizer


def values(model, optimizer):
    found = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return torch.cat([value.detach().flatten() for value in found]), optimizer.param_groups[0]["lr"]


def flip(path, at, bit=0x10):
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    "lie", [{"step": "x"}, {"replicas": None}, {"replicas": []}, {"optimizer": "x"}, {"checksums": []}], ids=str
)
def test_an_index_that_says_something_else(tmp_path, lie):
    model, optimizer = trained()
    path = shardcore.save_checkpoint(tmp_path, model, optimizer, step=1)
    index = json.loads((path / "shardcore.json").read_text())
    older = {name: value for name, value in index.items() if name != "checksums"}
    for about, verify in ((index, True), (index, False), (older, True)):
        (path / "shardcore.json").write_text(json.dumps({**about, **lie}))
        with pytest.raises(CheckpointError, match=r"shardcore\.json"):
            shardcore.load_checkpoint(path, model, optimizer, verify=verify)


def test_one_bit_anywhere(tmp_path):
    model, optimizer = trained()
    path = shardcore.save_checkpoint(tmp_path, model, optimizer, step=1)
    saved, lr = values(model, optimizer)
    refused = {}
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        for at in range(3, size, size // 12):
            flip(file, at)
            other = trained(seed=1)
            try:
                shardcore.load_checkpoint(path, *other)
            except CheckpointError:
                refused[file.name] = refused.get(file.name, 0) + 1
            else:  # of no consequence: between the values
                found, rate = values(*other)
                assert torch.equal(found, saved), (file.name, at)
                assert rate == lr, (file.name, at)
            flip(file, at)
    assert refused.keys() == {".metadata", "__0_0.distcp", "rank-0.json", "shardcore.json"}


def test_a_file_of_another_step(tmp_path):
    model, optimizer = trained()
    for step in (1, 2):
        path = shardcore.save_checkpoint(tmp_path, model, optimizer, step=step)
        with torch.no_grad():
            model.bias += 1
    shutil.copy(tmp_path / "step-1" / "__0_0.distcp", path)
    words = r"model\.bias in __0_0\.distcp .*step-2.* is not what was saved.*verify=False"
    with pytest.raises(CheckpointError, match=words):
        shardcore.load_checkpoint(path, *trained())
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(path).read("model.bias")
    shardcore.load_checkpoint(path, model, optimizer, verify=False)
    assert torch.equal(model.bias, Checkpoint(tmp_path / "step-1").read("model.bias"))


def test_one_without_checksums(tmp_path):
    model, optimizer = trained()
    path = shardcore.save_checkpoint(tmp_path, model, optimizer)
    index = json.loads((path / "shardcore.json").read_text())
    del index["checksums"]
    (path / "shardcore.json").write_text(json.dumps(index))
    other = trained(seed=1)
    shardcore.load_checkpoint(path, *other)
    assert torch.equal(values(*other)[0], values(model, optimizer)[0])


def on_another_mesh(folder):
    """One rank's half alone is damaged, in a part that each of both reads half of."""
    training = Training({"tp": 2})
    found = said(lambda: training.load(folder))
    assert all("is not what was saved" in text for text in found)
    training.load(folder, verify=False)
    return {name: whole(tensor) for name, tensor in training.model.state_dict().items()}


def test_ranks_that_read_parts_of_what_another_mesh_saved(pool, tmp_path):
    training = Training(steps=1)
    path = training.save(tmp_path)
    info = max(Checkpoint(path).metadata.storage_data.values(), key=lambda info: info.length)
    flip(path / info.relative_path, info.offset + info.length // 2, bit=0x01)
    mine = training.model.state_dict()
    for found in pool.run(on_another_mesh, str(tmp_path)):
        assert 0 < sum(not torch.equal(found[name], mine[name]) for name in found) <= 2
