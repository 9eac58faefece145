"""``shard(model, weights=...)``: models that were never there as a whole hold what the files hold."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny import TinyLM, TinyPolicy, batch, build, randomize
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import AgreementError, ConfigError, PartlyShardedError, ShardcoreWarning
from shardcore.weights.files import Files
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters


class WithBuffers(TinyLM):
    """A buffer that is saved, one that is not, one under two names, and one that is also a plain attribute."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("saved", torch.arange(4.0))
        self.register_buffer("unsaved", torch.linspace(0, 1, 5), persistent=False)
        self.register_buffer("again", self.saved)
        self.kept = self.unsaved
        self.table = {"scale": [torch.full((2,), 3.0)]}


class WithBuffersPolicy(TinyPolicy):
    def module_policy(self):
        return {**super().module_policy(), "WithBuffers": super().module_policy()["TinyLM"]}


def config_of(**options):
    return build(**options).config


def write(folder, model):
    """Save what a library would: no tensor twice, two files."""
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            state[name] = tensor
    names = sorted(state)
    for at in (0, 1):
        save_file({name: state[name] for name in names[at::2]}, Path(folder) / f"part-{at}.safetensors")


def empty(model_class, config):
    return shardcore.on_meta(model_class, config).to(torch.float64)


def equal(folder, options, fields):
    reference = build(**options)
    model = empty(TinyLM, config_of(**options))
    model.head.weight.requires_grad_(False)
    reference.head.weight.requires_grad_(False)
    assert all(p.is_meta for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-4)
    parameters = dict(model.named_parameters())
    shardcore.shard(model, policy=TinyPolicy, weights=folder, optimizer=optimizer, **fields)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, dict(reference.named_parameters())[name]), name
        assert parameter.requires_grad == parameters[name].requires_grad
        if fields.keys() <= {"tp"}:  # FSDP2 has parts of its own
            part = local_tensor(parameter)
            assert part.untyped_storage().nbytes() == part.nbytes, name  # which is what a pickle writes
    assert (model.head.weight is model.model.embed.weight) == bool(options.get("tied"))
    own = torch.optim.AdamW(reference.parameters(), lr=0.1, eps=1e-4)
    for seed in (0, 1):
        for one in (reference, model):
            ids = batch(seed, length=7)
            loss = one(ids=ids, labels=ids)
            loss.backward()
        assert_same_gradients(reference, model)
        for steps in (own, optimizer):
            steps.step()
            steps.zero_grad()
    assert_same_parameters(reference, model)


MESHES = {
    "alone": (1, {}),
    "tp 2": (2, {"tp": 2}),
    "tp 3": (3, {"tp": 3}),
    "shared heads": (4, {"tp": 4}),
    "tp 2, dp_shard 2": (4, {"tp": 2, "dp_shard_size": 2}),
    "dp_replicate 2": (2, {"dp_replicate_size": 2}),
    "dp_shard 2": (2, {"dp_shard_size": 2}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("tied", [False, True])
def test_meshes(pool, tmp_path, mesh, tied):
    world, fields = MESHES[mesh]
    options = {"tied": tied, "layers": 1, "heads": 6 if world == 3 else 8, "kv_heads": 3 if world == 3 else 2}
    options["hidden"] = 24 if world == 3 else 32
    write(tmp_path, build(**options))
    pool.run(equal, str(tmp_path), options, fields, world=world)


def buffers(folder):
    config = config_of()
    reference = WithBuffers(config)
    randomize(reference)
    with torch.no_grad():
        reference.saved.mul_(7)
    reference.register_buffer("wide", torch.arange(4.0).view(2, 2))
    if dist.get_rank() == 0:
        write(folder, reference)
    dist.barrier()
    # Buffers get what is in the files, be they real or not; the others keep what they have.
    model = shardcore.on_meta(WithBuffers, config)
    assert torch.equal(model.unsaved, reference.unsaved)
    assert model.again is model.saved
    assert model.kept is model.unsaved
    assert torch.equal(model.table["scale"][0], torch.full((2,), 3.0))
    wide = torch.zeros(()).expand(2, 2)
    model.register_buffer("wide", wide)
    shardcore.shard(model, policy=WithBuffersPolicy, weights=folder, tp=2)
    assert torch.equal(model.unsaved, reference.unsaved)
    assert torch.equal(model.saved, reference.saved)  # as load_state_dict does it
    assert torch.equal(model.wide, reference.wide)
    assert model.again is model.saved
    with torch.device("meta"):
        model = WithBuffers(config)
    model.register_buffer("unsaved", reference.unsaved.clone(), persistent=False)
    model.register_buffer("wide", torch.zeros(2, 2))
    shardcore.shard(model, policy=WithBuffersPolicy, weights=folder, tp=2)
    assert torch.equal(model.saved, reference.saved)
    assert model.again is model.saved
    ids = batch(0)
    assert_close(reference(ids=ids), model(ids=ids), "output", 1e-5)


def test_buffers(pool, tmp_path):
    pool.run(buffers, str(tmp_path))


def over_values(folder):
    reference, model = build(), build(seed=5)
    if dist.get_rank() == 0:
        write(folder, reference)
    dist.barrier()
    shardcore.shard(model, policy=TinyPolicy, weights=sorted(Path(folder).iterdir()), tp=2)
    assert_same_parameters(reference, model)
    halved = shardcore.on_meta(TinyLM, config_of()).to(torch.bfloat16)
    shardcore.shard(halved, policy=TinyPolicy, weights=folder, tp=2)
    for name, parameter in halved.named_parameters():
        assert torch.equal(parameter.full_tensor(), dict(reference.named_parameters())[name].to(torch.bfloat16)), name


def test_models_with_values_and_other_dtypes(pool, tmp_path):
    pool.run(over_values, str(tmp_path))


def trained_apart_from_the_file(folder):
    """Parts that stay mapped are this process's own: writing to them changes no file and no other rank."""
    reference = build()
    model = empty(TinyLM, config_of())
    shardcore.shard(model, policy=TinyPolicy, weights=folder, tp=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    again = empty(TinyLM, config_of())
    dist.barrier()
    shardcore.shard(again, policy=TinyPolicy, weights=folder, tp=2)
    assert_same_parameters(reference, again)
    twin = copy.deepcopy(again)
    assert_same_parameters(reference, twin)


def test_files_are_never_written_to(pool, tmp_path):
    write(tmp_path, build())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    pool.run(trained_apart_from_the_file, str(tmp_path))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# What is refused, on all ranks and with nothing changed.


def refused(folder, config, error, message, fields):
    model = empty(TinyLM, config)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(error, match=message):
        shardcore.shard(model, policy=TinyPolicy, tp=2, weights=folder, **fields)
    assert [id(p) for p in model.parameters()] == before


def test_what_does_not_fit(pool, tmp_path):
    state = build().state_dict()
    del state["model.norm.weight"]
    state["head.bias"] = torch.zeros(3)
    save_file(state, tmp_path / "model.safetensors")
    pool.run(refused, str(tmp_path), config_of(), ConfigError, r"head.bias is \(3,\) there and \(97,\) in the", {})
    state["head.bias"] = torch.zeros(97)
    save_file(state, tmp_path / "model.safetensors")
    pool.run(refused, str(tmp_path), config_of(), ConfigError, "lack 1 tensors of this TinyLM: model.norm.weight", {})
    pool.run(refused, str(tmp_path / "x"), config_of(), ConfigError, "is not there", {})
    pool.run(refused, str(tmp_path), config_of(), ConfigError, "both say where the values", {"sync_from": 0})
    pool.run(refused, 3, config_of(), ConfigError, "got int", {})


def one_rank(folder, what):
    model = empty(TinyLM, config_of())
    if dist.get_rank() == 1:
        folder = {"none": None, "other": f"{folder}/other", "unseen": f"{folder}/unseen"}[what]
    message = "differ in the tensors of weights=" if what != "unseen" else "unseen"
    with pytest.raises((AgreementError, ConfigError), match=message):
        shardcore.shard(model, policy=TinyPolicy, tp=2, weights=folder)


@pytest.mark.parametrize("what", ["none", "other", "unseen"])
def test_one_rank_sees_something_else(pool, tmp_path, what):
    state = build().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "other").mkdir()
    save_file({name: t.float() for name, t in state.items()}, tmp_path / "other" / "model.safetensors")
    pool.run(one_rank, str(tmp_path), what)


def fails_while_reading(folder):
    model = empty(TinyLM, config_of())
    count = []

    def failing(native):
        def read(self, key, box):
            count.append(key)
            if dist.get_rank() == 1 and len(count) == 5:
                raise ConfigError(f"{key} is gone")
            return native(self, key, box)

        return read

    native = Files.read, Files.keep
    Files.read, Files.keep = map(failing, native)
    try:
        with pytest.raises(PartlyShardedError, match="is gone"):
            shardcore.shard(model, policy=TinyPolicy, tp=2, weights=folder)
    finally:
        Files.read, Files.keep = native
    with pytest.raises(PartlyShardedError):
        model(ids=batch(0))


def test_a_failure_half_way_is_one_on_all_ranks(pool, tmp_path):
    write(tmp_path, build())
    pool.run(fails_while_reading, str(tmp_path))


def unused(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardcoreWarning)
        shardcore.shard(empty(TinyLM, config_of()), policy=TinyPolicy, tp=2, weights=folder)
    said = [str(w.message) for w in caught if w.category is ShardcoreWarning]
    assert len(said) == (dist.get_rank() == 0)
    assert not said or "no place for: extra.bias" in said[0]


def test_tensors_without_a_place_are_named_once(pool, tmp_path):
    save_file({**build().state_dict(), "extra.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    pool.run(unused, str(tmp_path))


def test_nn_modules_are_built_without_memory():
    model = shardcore.on_meta(nn.Linear, 1_000_000, 1_000_000, bias=False)  # 4 TB
    assert model.weight.is_meta
