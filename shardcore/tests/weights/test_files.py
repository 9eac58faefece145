"""Checkpoints of safetensors files: what is found where, and what is refused before anything is read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from shardcore.errors import ConfigError
from shardcore.weights.files import Files

A, B = torch.arange(12.0).view(3, 4), torch.arange(5, dtype=torch.int64)


def write(folder, names=("one.safetensors", "two.safetensors"), index="model.safetensors.index.json"):
    for name, state in zip(names, ({"a": A}, {"b": B}), strict=True):
        save_file(state, folder / name)
    places = {"a": names[0], "b": names[1]}
    if index:
        (folder / index).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("way", ["index", "variant", "any", "list", "single"])
def test_places(tmp_path, way):
    variant = None
    if way == "index":
        write(tmp_path)
        save_file({"c": A}, tmp_path / "more.safetensors")  # not in the index
    elif way == "variant":
        write(tmp_path, index="model.safetensors.index.fp16.json")
        variant = "fp16"
    elif way in ("any", "list"):
        write(tmp_path, index="")
    else:
        save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    place = sorted(tmp_path.glob("*.safetensors")) if way == "list" else tmp_path
    files = Files.at(place, variant=variant)
    assert {key: (stored.shape, stored.dtype) for key, stored in files.tensors.items()} == {
        "a": ((3, 4), torch.float32),
        "b": ((5,), torch.int64),
    }
    assert torch.equal(files.read("a", ((1, 3), (0, 2))), A[1:3, :2])
    assert torch.equal(files.source("b").read(((0, 5),)), B)
    files.close()


def test_what_is_kept_outlives_the_files(tmp_path):
    write(tmp_path)
    files = Files.at(tmp_path)
    kept, again = (files.keep("a", ((1, 3), (0, 4))) for _ in range(2))
    lent = files.read("a", ((0, 3), (0, 2)))
    assert kept.untyped_storage().data_ptr() == again.untyped_storage().data_ptr() != lent.untyped_storage().data_ptr()
    files.close()
    kept += 1
    assert torch.equal(kept, A[1:3] + 1)
    assert torch.equal(files.read("a", ((0, 3), (0, 4))), A), "another mapping, and the file is as it was"


def test_a_file_is_mapped_anew_after_some_bytes(tmp_path, monkeypatch):
    write(tmp_path)
    files = Files.at(tmp_path)
    monkeypatch.setattr("shardcore.weights.files._LENT", A.nbytes)
    seen = [files.read("a", ((0, 3), (0, 1))) for _ in range(4)]  # three rows each, however few of their columns
    assert [len({t.untyped_storage().data_ptr() for t in seen[:n]}) for n in (1, 2, 3, 4)] == [1, 1, 2, 2]


def test_tensors_that_are_not_aligned_are_not_kept(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 4 + 4)
    values = torch.tensor([1.5, -2.0])
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    files = Files.at(tmp_path)
    assert files.tensors["a"].begin % 4 == 1
    assert files.source("a").keep is None
    assert torch.equal(files.read("a", ((0, 2),)), values)


def test_a_file_that_became_shorter(tmp_path):
    write(tmp_path)
    files = Files.at(tmp_path)
    cut(tmp_path)
    with pytest.raises(ConfigError, match="has become shorter than its header says"):
        files.read("b", ((0, 5),))


def test_variant_of_one_file(tmp_path):
    save_file({"a": A}, tmp_path / "model.fp16.safetensors")
    save_file({"b": B}, tmp_path / "model.safetensors")
    assert list(Files.at(tmp_path, variant="fp16").tensors) == ["a"]


def test_numbers_and_odd_dtypes(tmp_path):
    state = {"number": torch.tensor(3.5), "half": A.to(torch.bfloat16), "small": A.to(torch.float8_e4m3fn)}
    save_file(state, tmp_path / "model.safetensors")
    files = Files.at(tmp_path)
    assert files.read("number", ()) == 3.5
    for name in ("half", "small"):
        assert files.tensors[name].dtype == state[name].dtype
        assert torch.equal(files.read(name, ((0, 3), (1, 4))).float(), state[name][:, 1:4].float())


def test_digest_goes_by_headers_and_values(tmp_path):
    """Hosts may have other revisions of a checkpoint, with equal headers."""
    for name, value in (("x", A), ("y", A + 1), ("z", A.double()), ("same", A.clone())):
        (tmp_path / name).mkdir()
        save_file({"a": value, "n": torch.tensor(3.0)}, tmp_path / name / "model.safetensors")
    x, y, z, same = (Files.at(tmp_path / name).digest for name in ("x", "y", "z", "same"))
    assert x == same
    assert len({x, y, z}) == 3


def test_of_an_indexed_checkpoint_the_last_file_wins(tmp_path):
    """As transformers reads it: all of each file that the index names, in the order of their names."""
    write(tmp_path)
    save_file({"a": A + 7, "b": B}, tmp_path / "two.safetensors")
    files = Files.at(tmp_path)
    assert torch.equal(files.read("a", ((0, 3), (0, 4))), A + 7)


def cut(folder):
    file = folder / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def headless(folder):
    (folder / "one.safetensors").write_bytes(b"\x00")


def gone(folder):
    (folder / "two.safetensors").unlink()


def lacking(folder):
    save_file({"c": B}, folder / "two.safetensors")


def twice(folder):
    (folder / "model.safetensors.index.json").unlink()
    save_file({"a": A}, folder / "two.safetensors")


def no_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def outside(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))


def numbered(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 3}}))


def pickled(folder):
    for file in folder.iterdir():
        file.unlink()
    (folder / "pytorch_model.bin").touch()


BROKEN = {
    cut: r"two.safetensors \(\d+ bytes\) cannot be read as a safetensors file",
    headless: r"one.safetensors \(1 bytes\) cannot be read",
    gone: r"two.safetensors \(not there\) cannot be read",
    lacking: "two.safetensors lacks b, which the index",
    twice: "a is in two files: .*one.safetensors and .*two.safetensors",
    no_index: "is no index of a checkpoint: KeyError",
    outside: "names '../one.safetensors', which is not in its own folder",
    numbered: "names 3, which is not in its own folder",
    pickled: "pytorch_model.bin, which is pickled; give a folder",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_checkpoints(tmp_path, broken):
    write(tmp_path)
    broken(tmp_path)
    with pytest.raises(ConfigError, match=BROKEN[broken]):
        Files.at(tmp_path)


@pytest.mark.parametrize(
    ("place", "message"),
    [("nowhere", "is not there; weights are read from"), ("x.bin", "is no .safetensors file"), ([], "no file was")],
)
def test_no_checkpoint(tmp_path, place, message):
    (tmp_path / "x.bin").touch()
    with pytest.raises(ConfigError, match=message):
        Files.at(tmp_path / place if isinstance(place, str) else place)


def test_a_file_that_goes_away(tmp_path):
    write(tmp_path)
    files = Files.at(tmp_path)
    gone(tmp_path)
    with pytest.raises(ConfigError, match=r"two.safetensors could not be read while b was loaded"):
        files.read("b", ((0, 5),))
