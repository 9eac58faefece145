"""Every rank reads its slices, or one rank of each host reads for all of them: the same bits, and no hang."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny import Config, TinyLM, TinyPolicy, build

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import AgreementError, ConfigError, PartlyShardedError
from shardcore.weights import filling, reading
from shardcore.weights.files import Files
from shardcore.weights.recipes import Source, slices
from shardcore.weights.scattering import Need, Scatter

TP2, DP2, BOTH = {"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}


@pytest.fixture
def folder(tmp_path):
    state = build(dtype=torch.float32).state_dict()
    names = sorted(state)
    for number in range(2):
        save_file({name: state[name] for name in names[number::2]}, tmp_path / f"part-{number}.safetensors")
    return tmp_path


def load(folder: Path, **options):
    return shardcore.shard(shardcore.on_meta(TinyLM, Config()), policy=TinyPolicy, weights=folder, **options)


@contextlib.contextmanager
def reads(fail_at: int | None = None):
    """Count the boxes that this rank reads, and let one of them fail."""
    seen, real = [], Files.read

    def read(self, key, box):
        seen.append(key)
        if len(seen) == fail_at:
            raise ConfigError(f"box {fail_at} of the test is torn")
        return real(self, key, box)

    with mock.patch.object(Files, "read", read):
        yield seen


def both_ways(folder, axes):
    with reads() as by_slices, mock.patch.object(Files, "keep", autospec=True, side_effect=Files.keep) as keep:
        slices = load(folder, reading="slices", **axes)
    with reads() as by_scatter:
        scatter = load(folder, reading="scatter", **axes)
    assert by_slices or keep.called
    assert bool(by_scatter) == (dist.get_rank() == 0)  # nobody else touches the files
    for (name, one), other in zip(slices.named_parameters(), scatter.parameters(), strict=True):
        assert torch.equal(local_tensor(one), local_tensor(other)), name
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in scatter.named_parameters()}


@pytest.mark.parametrize(
    ("world", "axes"),
    [(2, TP2), (2, DP2), (4, BOTH), (4, {**BOTH, "wrap": False})],
    ids=["tp", "dp", "both", "no wrap"],
)
def test_the_same_bits_either_way(pool, folder, world, axes):
    full = pool.run(both_ways, folder, axes, world=world)[0]
    state = build(dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in full.items())


def two_hosts(folder):
    names = {0: "a", 1: "b", 2: "a", 3: "b"}
    with mock.patch.object(reading, "_host", return_value=names[dist.get_rank()]), reads() as seen:
        load(folder, reading="scatter", tp=4)
    return bool(seen)


def test_one_rank_of_each_host_reads(pool, folder):
    assert pool.run(two_hosts, folder, world=4) == [True, True, False, False]


def torn(folder, ranks, number, axes):
    """Let the boxes of some ranks fail, and load again after it."""
    fails = dist.get_rank() in ranks
    with reads(number if fails else None), pytest.raises(PartlyShardedError) as caught:
        load(folder, reading="scatter", **axes)
    both_ways(folder, axes)  # nothing is left on its way
    return str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_failure_of_the_rank_that_reads(pool, folder, number):
    reader, *others = pool.run(torn, folder, (0,), number, {"tp": 4}, world=4)
    assert f"ConfigError: box {number} of the test is torn" in reader
    for other in others:
        assert (
            f"rank 0, which reads the files for the ranks of its host, failed. Its error: ConfigError: box {number}"
            in other
        )


def test_the_last_box_of_all_fails(pool, folder):
    count = len(pool.run(boxes_read, folder, world=2)[0])
    reader, other = pool.run(torn, folder, (0,), count, TP2, world=2)
    assert "of the test is torn" in reader
    assert "of the test is torn" in other


def boxes_read(folder):
    with reads() as seen:
        load(folder, reading="scatter", **TP2)
    return seen


def receiver_fails(folder, number):
    calls, real = [], filling._as

    def wrapped(like, local):
        calls.append(like)
        if len(calls) == number and dist.get_rank() == 1:
            raise MemoryError("no room")
        return real(like, local)

    with mock.patch.object(filling, "_as", wrapped), pytest.raises(PartlyShardedError) as caught:
        load(folder, reading="scatter", **TP2)
    both_ways(folder, TP2)
    return str(caught.value)


def test_a_failure_of_a_rank_that_is_given_boxes(pool, folder):
    zero, one = pool.run(receiver_fails, folder, 5, world=2)
    assert "rank 1 failed" in zero
    assert "MemoryError: no room" in zero
    assert "MemoryError: no room" in one


def rows_in_any_order():
    full = torch.arange(24.0).view(6, 4)
    source = Source((6, 4), torch.float32, lambda box: full[slices(box)])
    places = [(((4, 5), (0, 4)), (slice(0, 1),)), (((1, 2), (0, 4)), (slice(1, 2),))]
    need = Need("fused", torch.float32, tuple(sorted(box for box, _ in places)))
    local = torch.empty(2, 4)
    with Scatter([0, 1], [need]) as way:
        way.write(source, places, local)
    assert torch.equal(local, full[[4, 1]])


def test_boxes_of_one_tensor_come_in_one_order(pool):
    pool.run(rows_in_any_order, world=2)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_buffers_come_in_one_order(names):
    module = torch.nn.Module()
    for name in names:  # the order of a set, another one on each rank
        module.register_buffer(name, torch.zeros(2))
    recipes = {name: Source((2,), torch.float32, lambda box: torch.zeros(2)[slices(box)], name) for name in names}
    assert [need.name for need in filling.needs_of(module, recipes)] == ["a", "b"]
    written = []
    with mock.patch.object(filling, "_filled", lambda buffer, recipe, *_: written.append(recipe.name) or buffer):
        filling.fill(module, recipes, torch.device("cpu"))
    assert written == ["a", "b"]


def other_models(folder):
    parts = filling.needs_of

    def needs_of(model, recipes):
        needs = parts(model, recipes)
        return needs[1:] if dist.get_rank() else needs

    with mock.patch("shardcore.weights.loading.needs_of", needs_of), pytest.raises(PartlyShardedError) as caught:
        load(folder, reading="scatter", **TP2)
    dist.barrier()
    return str(caught.value)


def test_ranks_that_expect_other_tensors(pool, folder):
    for message in pool.run(other_models, folder, world=2):
        assert "ranks 0 and 1 do not load the same tensors: only one of them has model.positions" in message


def wrong_arguments(folder):
    with pytest.raises(ConfigError, match="reading= must be one of 'auto', 'slices', 'scatter', got 'fast'"):
        load(folder, reading="fast", **TP2)
    with pytest.raises(AgreementError, match="differ in the argument reading: slices on rank 0, scatter on rank 1"):
        load(folder, reading=("slices", "scatter")[dist.get_rank()], **TP2)
    with pytest.raises(ConfigError, match="reading='scatter' says who reads weights=, which are not given"):
        shardcore.shard(build(), policy=TinyPolicy, tp=2, reading="scatter")


def test_wrong_arguments(pool, folder):
    pool.run(wrong_arguments, folder, world=2)


def automatic(folder, network_ranks):
    with mock.patch.object(reading, "on_network", return_value=dist.get_rank() in network_ranks), reads() as seen:
        load(folder, **TP2)
    return bool(seen)


def test_a_network_file_system_on_any_rank_decides_for_all(pool, folder):
    assert pool.run(automatic, folder, (), world=2) == [True, True]
    assert pool.run(automatic, folder, (1,), world=2) == [True, False]


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / {0} rw - overlay none rw
29 22 0:39 / {0}/net rw - tmpfs none rw
31 22 0:41 / {0}/net rw shared:7 master:1 - {1} server:/x rw
32 22 0:42 / {0}/net/fast\040disk rw - xfs /dev/nvme0 rw
torn line
"""


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [("nfs4", True), ("lustre", True), ("fuse.juicefs", True), ("fuseblk", False), ("tmpfs", False), ("ext4", False)],
)
def test_kinds_of_file_systems(tmp_path, monkeypatch, kind, is_network):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.format(tmp_path, kind))
    monkeypatch.setattr(reading, "_MOUNTS", table)
    for place in ("net/fast disk", "network"):
        (tmp_path / place).mkdir(parents=True)
    assert reading.on_network([tmp_path / "net" / "a.safetensors"]) == is_network
    assert not reading.on_network([tmp_path / "net/fast disk" / "a.safetensors"])
    assert not reading.on_network([tmp_path / "network" / "a.safetensors"])  # a name that begins alike
    (tmp_path / "cache").symlink_to(tmp_path / "net")
    assert reading.on_network([tmp_path / "network" / "a", tmp_path / "cache" / "a"]) == is_network
    table.unlink()
    assert not reading.on_network([tmp_path / "net" / "a"])
