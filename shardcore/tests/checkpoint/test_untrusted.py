"""Nothing in the files of a checkpoint is run by loading it."""

from __future__ import annotations

import io
import json
import os
import pickle
from enum import Enum

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import shardcore
from shardcore.checkpoint import Checkpoint
from shardcore.errors import CheckpointError


class Evil:
    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


@pytest.fixture
def saved(tmp_path):
    return shardcore.save_checkpoint(tmp_path / "run", nn.Linear(3, 2), step=0)


def replace(path, name, data):
    """Write a file of a checkpoint anew, with an index that says so and has no checksums."""
    (path / name).write_bytes(data)
    index = json.loads((path / "shardcore.json").read_text())
    index.pop("checksums", None)
    index["files"][name] = len(data)
    (path / "shardcore.json").write_text(json.dumps(index))


def metadata(path):
    return pickle.loads((path / ".metadata").read_bytes())


def refused(path, words):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=words):
        shardcore.load_checkpoint(path, model)
    assert torch.equal(model.weight, before)


def test_the_list_of_tensors(saved, tmp_path):
    evil = pickle.dumps(Evil(tmp_path / "proof"))
    replace(saved, ".metadata", evil)
    refused(saved, r"\.metadata names posix\.mkdir, which describes no tensor")
    assert not (tmp_path / "proof").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(saved).read_metadata()  # DCP's own reader does run it
    assert (tmp_path / "proof").exists()


@pytest.mark.parametrize("place", ["planner_data", "storage_meta"])
def test_inside_of_a_real_list(saved, tmp_path, place):
    found = metadata(saved)
    setattr(found, place, Evil(tmp_path / "proof"))
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, "describes no tensor")
    assert not (tmp_path / "proof").exists()


class Asked:
    """What a pickle says where something is asked for an attribute."""

    def __init__(self, *asked):
        self.asked = asked

    def __reduce__(self):
        return getattr, self.asked


class MembersByGetattr(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.2 does."""

    def reducer_override(self, thing):
        return (getattr, (type(thing), thing.name)) if isinstance(thing, Enum) else NotImplemented


def test_members_by_getattr(saved):
    stream = io.BytesIO()
    MembersByGetattr(stream).dump(metadata(saved))
    assert b"getattr" in stream.getvalue()
    replace(saved, ".metadata", stream.getvalue())
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    shardcore.load_checkpoint(saved, model)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("kind", "name"), [(torch.Size, "__init__"), (type(None), "__subclasses__")])
def test_no_other_attributes_by_getattr(saved, kind, name):
    found = metadata(saved)
    found.planner_data = Asked(kind, name)
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, "describes no tensor")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_part(saved, tmp_path, zipped):
    stream = io.BytesIO()
    torch.save(Evil(tmp_path / "proof"), stream, _use_new_zipfile_serialization=zipped)
    found = metadata(saved)
    for info in found.storage_data.values():
        info.offset, info.length = 0, len(stream.getvalue())
    replace(saved, ".metadata", pickle.dumps(found))
    replace(saved, "__0_0.distcp", stream.getvalue())
    refused(saved, "a part of .* is damaged: UnpicklingError")
    assert not (tmp_path / "proof").exists()


def test_a_file_elsewhere(saved):
    found = metadata(saved)
    for info in found.storage_data.values():
        info.relative_path = "../../other"
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, "names a file outside of the checkpoint")


def test_what_is_no_tensor(saved):
    found = metadata(saved)
    found.state_dict_metadata["model.weight"] = found.state_dict_metadata["model.weight"].size
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, "says that model.weight is no tensor")


def test_a_list_with_a_hole(saved):
    found = metadata(saved)
    found.state_dict_metadata["model.weight"].chunks.clear()
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, "lacks a part of model.weight")


def test_a_place_that_is_none(saved):
    found = metadata(saved)
    found.storage_data[next(iter(found.storage_data))] = torch.Size((1,))
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, r"\.metadata cannot be read: AttributeError")


def test_a_part_without_a_place(saved):
    found = metadata(saved)
    del found.storage_data[next(index for index in found.storage_data if index.fqn == "model.weight")]
    replace(saved, ".metadata", pickle.dumps(found))
    refused(saved, r"\.metadata does not say where all parts of model\.weight are")


@pytest.mark.parametrize("data", [b"", b"\x80\x04", pickle.dumps({}), pickle.dumps([1])])
def test_a_damaged_list(saved, data):
    replace(saved, ".metadata", data)
    refused(saved, r"\.metadata (cannot be read|is not the index)")


def test_looking_at_one(saved):
    checkpoint = Checkpoint(saved.parent)
    assert (checkpoint.path, checkpoint.step) == (saved, 0)
    assert dict(checkpoint.tensors) == {
        "model.weight": (torch.Size((2, 3)), torch.float32),
        "model.bias": (torch.Size((2,)), torch.float32),
    }
    assert sorted(checkpoint.names()) == ["bias", "weight"]
    assert checkpoint.bytes_of("model.weight") == 24
    model = nn.Linear(3, 2)
    shardcore.load_checkpoint(saved, model)
    assert torch.equal(checkpoint.read("model.weight"), model.weight)
    assert checkpoint.value("extra") is None
    assert checkpoint.of_rank(0)["replica"] == 0
