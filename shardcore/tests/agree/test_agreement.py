from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, build
from torch import nn

import shardcore
from shardcore.agree import fingerprint
from shardcore.agree.agreement import Report, agree, is_alone
from shardcore.agree.fingerprint import checksum, tensor_items
from shardcore.errors import AgreementError, ConfigError, ShardcoreError
from shardcore_planner import simulated_ranks

SAME = "Start every rank from the same environment, with the same model and the same arguments."


def _model(change=None):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    with torch.no_grad():
        for i, tensor in enumerate((*model.parameters(), *model.buffers())):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + i)
    if change:
        change(model)
    return dict(tensor_items(model)[1])


def _swap(model):
    with torch.no_grad():
        model[0].weight[[0, 1]] = model[0].weight[[1, 0]].clone()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m[0].weight.data[2, 1].add_(1e-6), "the values of 0.weight"),
        (lambda m: m[0].bias.data[4].neg_(), "the values of 0.bias"),
        (lambda m: m[1].running_var[0].add_(1), "the values of 1.running_var"),
        (lambda m: m[1].num_batches_tracked.add_(1), "the values of 1.num_batches_tracked"),
    ],
)
def test_a_checksum_sees_every_tensor(change, name):
    plain, changed = _model(), _model(change)
    assert plain == _model()
    assert {key for key in plain if plain[key] != changed[key]} == {name}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (), (0, 4)])
def test_a_checksum_of_any_dtype_and_shape(dtype, shape):
    ones, zeros = torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)
    assert (checksum(ones) != checksum(zeros)) == (ones.numel() > 0)
    assert checksum(zeros.to("meta")) == "on the meta device"
    whole = torch.arange(24.0).to(torch.float64).view(4, 6).t()
    assert checksum(whole) == checksum(whole.contiguous())


def test_tensors_are_described():
    module = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    about, values = tensor_items(module, values=False)
    assert about == [
        ("the shape of weight", "(2, 3)"),
        ("the dtype of weight", "torch.bfloat16"),
        ("requires_grad of weight", "False"),
    ]
    assert values == []


def test_a_checksum_of_a_part_that_is_not_aligned():
    base = torch.zeros(41, dtype=torch.int8)
    assert checksum(base[1:41]) == checksum(base[1:41].view(torch.uint8))


def test_elements_that_change_places_are_seen():
    big = torch.zeros(3 << 16)
    big[0] = 1.0
    for place in (1, 256, 1 << 13, 2 << 16):  # of the same word, of the same row, of other rows
        moved = torch.zeros(3 << 16)
        moved[place] = 1.0
        assert checksum(big) != checksum(moved), place


def test_alone_there_is_nothing_to_agree_on():
    own = Report(items=(("a", "b"),), seed=3)
    assert list(agree(own)) == [own]
    with pytest.raises(KeyError):
        agree(failure=KeyError("x"))


def _text(own, failure=None, **options):
    try:
        return [report.seed for report in agree(own, failure, **options)]
    except AgreementError as error:
        return str(error)
    except ArithmeticError as error:
        return f"own: {error}"


def reports():
    rank = dist.get_rank()
    found = {"agree": _text(Report(items=(("a", "1"),), seed=7 + rank))}
    items = (("the plan", "x"), ("the values of w", "1" if rank < 2 else "2"), ("the values of z", str(rank)))
    found["tensor"] = _text(Report(items=items))
    found["plan"] = _text(Report(items=(("the plan", "x" if rank != 1 else "y"), *items[1:])))
    found["absent"] = _text(Report(items=items[:2] if rank == 1 else items[:1]))
    found["order"] = _text(Report(items=(("a", "1"), ("b", "2"))[:: 1 if rank else -1]))
    failure = ArithmeticError(f"of rank {rank}") if rank > 0 else None
    own = Report()
    found["failed"] = _text(own, failure)
    found["changing"] = _text(own, failure, changing=True)
    return found


def _told_by():
    rank = dist.get_rank()
    failure = ConfigError("the same" if rank else "another")
    found = []
    for own, error in (
        (Report(items=(("a", str(rank)),)), None),
        (Report(), failure),
        (Report(), None) if rank == 0 else (Report(), failure),
    ):
        with pytest.raises(ShardcoreError) as caught:
            agree(own, error)
        found.append(caught.value.told_by)
    return found


def test_one_of_the_ranks_that_have_the_same_to_say_tells_it(pool):
    assert pool.run(_told_by, world=3) == [[0, 0, 1], [0, 1, 1], [0, 1, 1]]


def test_what_ranks_say_to_each_other(pool):
    found = pool.run(reports, world=3)
    assert [f["agree"] for f in found] == [[7, 8, 9]] * 3
    weights = (
        "Build the same model from the same weights on every rank (the same seed, or the same checkpoint), or pass "
        "sync_from=0 to take the weights of rank 0."
    )
    for own in found:
        assert own["tensor"] == (
            f"ranks 0 and 1 differ in the values of z: 0 on rank 0, 1 on rank 1. Nothing was changed. {weights}"
        )
        assert own["plan"] == (
            f"ranks 0 and 1 differ in the plan: x on rank 0, y on rank 1. Nothing was changed. {SAME}"
        )
        assert own["absent"] == (
            f"ranks 0 and 1 differ in the values of w: nothing on rank 0, 1 on rank 1. Nothing was changed. {weights}"
        )
        assert own["order"] == "ranks 0 and 1 report the same things in another order; nothing was changed."
    assert [own["failed"] for own in found] == [
        "rank 1 failed, so no rank was changed. Its error: ArithmeticError: of rank 1",
        "own: of rank 1",
        "own: of rank 2",
    ]
    assert found[0]["changing"] == (
        "rank 1 failed, while the models were being changed. Its error: ArithmeticError: of rank 1"
    )


@pytest.mark.nightly
def test_a_checksum_needs_a_small_buffer_only():
    """Peak memory beyond the tensor itself, in a process of its own: sums of 32-bit words are taken in 64 bits."""
    code = (
        "import resource, torch\n"
        "from shardcore.agree.fingerprint import checksum\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "checksum(torch.zeros(1 << 22)); tensor = torch.ones(1 << 26)\n"  # 16 MiB and 256 MiB
        "before = peak(); checksum(tensor); print(peak() - before)\n"
    )
    grown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(grown) < 64


def test_one_rank_computes_no_checksums(monkeypatch):
    monkeypatch.setattr(fingerprint, "checksum", lambda tensor: pytest.fail("nobody compares it"))
    shardcore.shard(build(), policy=TinyPolicy, tp=1)


def long_reports():
    """Reports that fit and reports that do not, of one rank alone."""
    sent, real = [], dist.all_gather

    def all_gather(out, own, group=None):
        sent.append(own.numel())
        return real(out, own, group=group)

    with mock.patch.object(dist, "all_gather", all_gather):
        agree(Report(items=(("one", "1"),)))
        assert len(sent) == 1
        error = ConfigError("long " * 2000)
        failure = error if dist.get_rank() else None
        with pytest.raises(ConfigError if failure else AgreementError, match=r"(long ){2000}"):
            agree(failure=failure)
        assert len(sent) == 3


@pytest.mark.nightly
def test_one_collective_unless_a_report_is_long(pool):
    pool.run(long_reports, world=2)


def test_simulated_ranks_are_not_asked():
    """What a collective among them leaves in its buffers is no report."""
    own = Report(items=(("one", "1"),), seed=5)
    with simulated_ranks(4, rank=1):
        assert is_alone()
        assert agree(own) == [own]
        with pytest.raises(ConfigError, match="own"):
            agree(failure=ConfigError("own"))


def fails_before_a_policy_is_inferred():
    wrong = {"weights": "model.safetensors", "sync_from": 0} if dist.get_rank() else {}
    with pytest.raises(ConfigError if dist.get_rank() else AgreementError, match="both say where the values come from"):
        shardcore.shard(build(), policy="infer", tp=2, **wrong)


def test_a_rank_that_fails_before_one_infers_for_all(pool):
    pool.run(fails_before_a_policy_is_inferred, world=2, timeout=20)
