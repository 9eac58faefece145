"""Pipelines over ranks train as the whole model does, in every schedule and beside every other axis."""

from __future__ import annotations

import copy
import itertools
from pipes import LAYERS, close, engine, labelled, pipeline, whole_step
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardcore
from shardcore.api import shard
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.pipeline import SCHEDULES, Boundary, StageMetadata, micro_batches
from shardcore.pipeline.ranks import PipelineRanks
from shardcore.pipeline.schedules import forward_only
from shardcore.plan import Stages
from shardcore.policy import Policy
from shardcore.styles import replicate, sequence

pytestmark = PIPELINES


def trains(schedule: str, options: dict[str, Any]) -> None:
    reference = build(layers=LAYERS, **options)
    pipe = pipeline(copy.deepcopy(reference), pipeline_schedule=schedule)
    names = dict(reference.named_parameters(remove_duplicate=False))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (reference, pipe)]
    for step in range(5):
        calls = [labelled(2 * step, 8, 6 + step % 2), labelled(2 * step + 1, 16, 5)][: 1 + step % 2]  # accumulated
        for call in calls:
            assert abs(float(whole_step(reference, call)) - float(pipe.train_step(call))) <= 1e-12
        # Some true gradients are zero, so that an error counts against the largest of all.
        scale = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
        for name, parameter in pipe.named_parameters(remove_duplicate=False):
            close(names[name].grad, parameter.grad, f"step {step}: gradient of {name}", scale=scale)
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        close(wanted, pipe.clip_grad_norm_(0.1), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            evaluated = pipe.eval_step(labelled(99))
            wanted = float(reference(**labelled(99)))
        assert abs(float(evaluated) - wanted) <= 1e-11
        assert all(parameter.grad is None for parameter in pipe.parameters())
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        close(names[name], parameter, f"{name} after the last step", 1e-11)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [name for name, _ in pipe.named_parameters(remove_duplicate=False)])
    assert set().union(*held) == set(names)
    assert sum(map(len, held)) == len(names)


# One that runs one stage on each rank, and one that runs two and splits the backward; the others by night.
ALL = [
    schedule if schedule in ("1f1b", "zbv") else pytest.param(schedule, marks=pytest.mark.nightly)
    for schedule in SCHEDULES
]


@pytest.mark.parametrize("schedule", ALL)
def test_every_schedule_trains_as_the_whole_model(pool, schedule):
    pool.run(trains, schedule, {"tied": True}, world=2)


def uneven(schedule: str, settings: dict[str, Any]) -> None:
    """Batches of any number of rows: the last micro-batch is smaller, and there may be fewer than a schedule needs."""
    reference = build(layers=LAYERS, tied=True)
    pipe = pipeline(copy.deepcopy(reference), pipeline_schedule=schedule, **{"num_microbatches": None, **settings})
    names = dict(reference.named_parameters(remove_duplicate=False))
    for rows in (7, 8, 1, 5):
        call = labelled(rows, rows) if rows > 2 else {"ids": batch(0, 1, 4), "labels": batch(1, 1, 4)}
        outputs: list[Any] = []
        got = pipe.train_step(call, outputs=outputs)
        wanted = whole_step(reference, call)
        assert abs(float(wanted) - float(got)) <= 1e-12, rows
        if engine(pipe).stages[-1].is_last:
            assert len(outputs) == len(micro_batches(call, **numbers(settings)))
        with torch.no_grad():
            assert abs(float(pipe.eval_step(call)) - float(got)) <= 1e-12
    scale = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        close(names[name].grad, parameter.grad, name, scale=scale)


def numbers(settings: dict[str, Any]) -> dict[str, Any]:
    return {"number": settings.get("num_microbatches"), "size": settings.get("microbatch_size")}


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{"num_microbatches": 4}, {"microbatch_size": 2}], ids=str)
@pytest.mark.parametrize("schedule", ALL)
def test_batches_that_do_not_divide(pool, schedule, settings):
    pool.run(uneven, schedule, settings, world=2)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "non-reentrant"}], ids=str)
def test_more_ranks(pool, options):
    pool.run(trains, "1f1b", options, world=4)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which ranks have parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class SequencePolicy(TinyPolicy):
    def module_policy(self) -> dict[str, Any]:
        rows = super().module_policy()
        return {**rows, "Decoder": [*rows["Decoder"], sequence(scatter="layers[0]", gather="norm")]}


def together(schedule: str, options: dict[str, Any], axes: dict[str, Any]) -> None:
    """Train on several axes at once, each replica on its own batch, as the whole model does on all of them."""
    reference = build(layers=LAYERS, **options)
    replicas = axes.get("dp", 1)
    pipe = pipeline(copy.deepcopy(reference), SequencePolicy, pp=2, pipeline_schedule=schedule, **axes)
    names = dict(reference.named_parameters(remove_duplicate=False))
    replica = dist.get_rank() // axes.get("tp", 1) % replicas
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (reference, pipe)]
    for step in range(3):
        for number in range(1 + step % 2):
            calls = [labelled(10 * step + 5 * number + other, 8, 6 + step % 2) for other in range(replicas)]
            losses = [whole_step(reference, call) for call in calls]
            assert abs(float(losses[replica]) - float(pipe.train_step(calls[replica]))) <= 1e-12
        for parameter in reference.parameters():
            parameter.grad /= replicas  # FSDP2 averages over replicas
        shardcore.reduce_partial_gradients(pipe)
        scale = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
        for name, parameter in pipe.named_parameters(remove_duplicate=False):
            close(names[name].grad, whole(parameter.grad), f"step {step}: gradient of {name}", scale=scale)
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        close(wanted, pipe.clip_grad_norm_(0.1), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            close(reference(**calls[replica]), pipe.eval_step(calls[replica]), "evaluation", 1e-11)
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        close(names[name], whole(parameter), f"{name} after the last step", 1e-11)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({}, {"tp": 2}),
        ({"tied": True}, {"tp": 2, "enable_sequence_parallelism": True}),
        ({}, {"tp": 2, "partial_gradients": "deferred", "parallel_output": True}),
        ({"tied": True}, {"dp": 2}),
        ({"tied": True}, {"dp": 2, "dp_replicate_size": 2}),
    ],
    ids=["tp", "sequence", "deferred", "dp", "replicas"],
)
def test_with_another_axis(pool, schedule, options, axes):
    pool.run(together, schedule, options, axes, world=4)


class Everywhere(nn.Module):
    """A scale that every stage reads."""

    class Block(nn.Module):
        def __init__(self, scale: nn.Module) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.__dict__["scale"] = scale  # the model's, not the block's

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x) * self.scale(x.new_ones(4))

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 1)
        self.blocks = nn.ModuleList(self.Block(self.scale) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class EverywherePolicy(Policy):
    stages = Stages(blocks="blocks", everywhere="scale")

    def module_policy(self) -> dict[str, Any]:
        return {"Everywhere": [replicate("scale")], "Block": [replicate("inner")]}


def shared(world: int) -> None:
    torch.manual_seed(3)
    reference = Everywhere().double()
    pipe = pipeline(copy.deepcopy(reference), EverywherePolicy)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole_step(reference, {"x": x})
    pipe.train_step({"x": x})
    close(reference.scale.weight.grad, pipe.scale.weight.grad, "scale")
    copies = [torch.empty_like(reference.scale.weight) for _ in range(world)]
    dist.all_gather(copies, pipe.scale.weight.grad)
    assert all(torch.equal(copies[0], other) for other in copies)
    close(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0), pipe.clip_grad_norm_(1.0), "norm")


@pytest.mark.parametrize("world", [2, 4])
def test_what_all_stages_hold_gets_one_gradient(pool, world):
    pool.run(shared, world, world=world)


def shapes() -> None:
    pipe = pipeline(build(layers=LAYERS))
    for length in (5, 6, 7, 6):
        pipe.train_step(labelled(length=length))
    assert len(engine(pipe)._schedules) == 2
    assert ["7), torch" in key or ", 7)" in key for key in engine(pipe)._schedules] == [True, False]


def test_schedules_of_two_shapes_are_kept(pool):
    pool.run(shapes, world=2)


def draws() -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        model = build(layers=LAYERS, dropout=0.3, checkpoint="non-reentrant")
        torch.manual_seed(seed + dist.get_rank())  # the stream of the first rank counts
        pipe = pipeline(model)
        users = torch.Generator()
        users.set_state(torch.get_rng_state())
        found = [float(pipe.train_step(labelled())) for _ in range(2)]
        for _ in found:
            torch.randint(1 << 62, (), generator=users)  # of which a step's numbers are made
        assert torch.equal(users.get_state(), torch.get_rng_state())
        return found

    first = losses(0)
    assert first == losses(0)
    assert first[0] != first[1]
    assert first != losses(1)


def test_dropout_is_reproducible(pool):
    pool.run(draws, world=2)


def test_micro_batches():
    call = {"ids": torch.arange(12).view(6, 2), "scale": torch.ones(()), "flag": True, "more": [torch.ones(6), None]}
    parts = micro_batches(call, number=3)
    assert [part["ids"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert all(part["flag"] is True and part["scale"].ndim == 0 and part["more"][0].shape == (2,) for part in parts)
    assert len(micro_batches(call, size=1)) == 6
    assert [len(part["ids"]) for part in micro_batches(call, size=4)] == [4, 2]
    assert [len(part["ids"]) for part in micro_batches(call, number=4)] == [2, 2, 2]
    assert [len(part["ids"]) for part in micro_batches(call, number=9)] == [1] * 6
    with pytest.raises(ConfigError, match="has no tensor with rows"):
        micro_batches({"flag": True}, size=4)


def masks() -> None:
    def losses(**settings: Any) -> list[float]:
        torch.manual_seed(0)
        pipe = pipeline(build(layers=LAYERS, dropout=0.3, checkpoint="non-reentrant"), **settings)
        return [float(pipe.train_step(labelled())) for _ in range(2)]

    wanted = losses()
    assert wanted[0] != wanted[1]
    for settings in (
        {"pipeline_bounds": (0, 1, 4)},
        {"pipeline_schedule": "gpipe"},
        {"pipeline_schedule": "zbv"},
        {"pipeline_schedule": "interleaved"},
    ):
        assert losses(**settings) == wanted, settings


def test_dropout_depends_neither_on_schedules_nor_on_cuts(pool):
    pool.run(masks, world=2)


def called() -> None:
    reference = build(layers=LAYERS)
    pipe = pipeline(copy.deepcopy(reference), pipeline_schedule="interleaved")
    ids = labelled()["ids"]
    with torch.no_grad():
        assert torch.equal(pipe(ids=ids), reference(ids=ids))
        assert torch.equal(pipe(ids=ids[:3]), reference(ids=ids[:3]))
        with pytest.raises(NotSupportedError, match="positional arguments; pass them by name"):
            pipe(ids)
        for kept in ({"use_cache": True}, {"past_key_values": object()}, {"cache": object()}):
            with pytest.raises(NotSupportedError, match="a cache, of which each rank would have some layers"):
                pipe(ids=ids, **kept)
    with pytest.raises(NotSupportedError, match=r"records gradients; call model.train_step\(batch\)"):
        pipe(ids=ids)
    with pytest.raises(ConfigError, match=r"a Tensor has no loss; pass labels, or give loss="):
        pipe.train_step({"ids": ids})
    assert abs(float(pipe.train_step(labelled())) - float(whole_step(reference, labelled()))) <= 1e-12


def test_a_call_runs_through_all_stages(pool):
    pool.run(called, world=2)


def test_outputs_travel_where_the_group_is():
    """As NCCL alone serves no tensor of the CPU, "fake" serves those on meta here."""
    ranks = object.__new__(PipelineRanks)
    ranks.rank, ranks.group = 0, None
    out = {"logits": torch.empty(2, 3, device="meta"), "kind": "plain", "inside": torch.empty(1, device="meta")}
    dist.init_process_group("meta:fake", store=FakeStore(), rank=0, world_size=2)
    try:
        found = ranks.broadcast(out, 0, (2,))
    finally:
        dist.destroy_process_group()
    assert found == {**out, "inside": None}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_send_and_receive_in_evaluations_in_one_order(monkeypatch, schedule, count, world):
    """Two ranks may share one communicator for both directions, and its batches wait for each other."""
    plan = SCHEDULES[schedule]
    number = 2 * world if plan.looped else world
    ranks, form = plan.ranks(number, world), torch.empty(1, device="meta")
    boundaries = [Boundary(block=str(n), places=(0,), values=(form,)) for n in range(1, number)]
    metadata = StageMetadata(outputs={}, boundaries=tuple(boundaries), missing=())
    monkeypatch.setattr(dist, "P2POp", lambda way, tensor, group, group_peer: (way is dist.isend, group_peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: sent.append(batch) or [])
    asked, ran = {}, []

    def run(stage, metadata, number, arrived):
        ran.append((stage.index, number))
        return (torch.ones(1),)

    for rank in range(world):
        asked[rank] = sent = []
        stages = [SimpleNamespace(index=n) for n, of in enumerate(ranks) if of == rank]
        failure = forward_only(run, stages, range(count), metadata, ranks=ranks, group=None, device="cpu")
        assert failure is None
    assert sorted(ran) == [(stage, n) for stage in range(number) for n in range(count)]
    for one, other in itertools.combinations(range(world), 2):
        here = [sorted(sends for sends, peer in batch if peer == other) for batch in asked[one]]
        there = [sorted(not sends for sends, peer in batch if peer == one) for batch in asked[other]]
        assert [batch for batch in here if batch] == [batch for batch in there if batch]


def repointed(options: dict[str, Any]) -> None:
    reference = build(layers=LAYERS, **options)
    model = copy.deepcopy(reference)

    def adamw(net: Any) -> torch.optim.Optimizer:
        head = {id(parameter) for parameter in net.head.parameters()}
        others = [parameter for parameter in net.model.parameters() if id(parameter) not in head]
        return torch.optim.AdamW([{"params": net.head.parameters(), "lr": 0.1}, {"params": others}], eps=1e-4)

    first, second = adamw(reference), adamw(model)
    groups = second.param_groups
    pipe = pipeline(model, optimizer=second)
    whole_step(reference, labelled())
    pipe.train_step(labelled())
    first.step()
    second.step()
    assert second.param_groups is groups
    names = dict(reference.named_parameters(remove_duplicate=False))
    assert [name for name, p in pipe.named_parameters() if (p - names[name]).abs().max() > 1e-9] == []
    held = [len(group["params"]) for group in groups]
    assert sum(held) == len(list(pipe.parameters()))
    if not options:
        assert (held[0] == 0) == (dist.get_rank() == 0)


@pytest.mark.parametrize("options", [{}, {"tied": True}], ids=str)
def test_an_optimizer_keeps_its_groups(pool, options):
    pool.run(repointed, options, world=2)


def loads() -> None:
    reference, pipe = build(1, layers=LAYERS), pipeline(build(layers=LAYERS))
    state = reference.state_dict()
    for model, part in ((pipe, ""), (pipe.model, "model.")):
        model.load_state_dict({n.removeprefix(part): t for n, t in state.items() if n.startswith(part)})
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, state[name]) or not name.startswith(part)
            nn.init.zeros_(parameter)
    assert pipe.load_state_dict(pipe.state_dict()).missing_keys == []  # a file for each rank
    lacking = [{n: t for n, t in state.items() if n != left} for left in ("model.layers.0.norm1.weight", "head.weight")]
    for wrong in ({**state, "more": torch.zeros(1)}, *lacking):
        with pytest.raises(RuntimeError, match=r"(Unexpected|Missing) key\(s\) in state_dict: \"[\w.]+\"\. *$"):
            pipe.load_state_dict(wrong)
    assert pipe.load_state_dict({**state, "more": torch.zeros(1)}, strict=False).unexpected_keys == ["more"]


def test_a_whole_state_is_loaded(pool):
    pool.run(loads)


def mixed(axes: dict[str, Any]) -> None:
    """Under mixed precision a pipeline computes what the model with replicas alone does, in the same micro-batches."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    first = build(layers=LAYERS, tied=True, dtype=torch.float32)
    second = copy.deepcopy(first)
    plain = shard(first, policy=TinyPolicy, tp=1, wrap={"mp_policy": policy, "reshard_after_forward": False})
    pipe = pipeline(second, wrap={"mp_policy": policy}, **axes)
    wanted = whole_step(plain, labelled())
    got = pipe.train_step(labelled())
    assert got.dtype == torch.bfloat16 or got.dtype == torch.float32
    close(wanted, got, "loss", 1e-2)
    names = dict(plain.named_parameters(remove_duplicate=False))
    grads = {name: whole(p.grad) for name, p in names.items()}  # on all ranks
    scale = max(float(grad.abs().max()) for grad in grads.values())
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        assert parameter.dtype == torch.float32
        close(grads[name], whole(parameter.grad), name, 2e-2, scale=scale)
    assert bool(pipe.eval_step(labelled()).isfinite())


@pytest.mark.parametrize(
    "axes", [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2, "pipeline_schedule": "zbv"}, {"pp": 4}], ids=str
)
def test_mixed_precision(pool, axes):
    pool.run(mixed, axes, world=4)


def on_a_mesh() -> None:
    """A pipeline is an axis of the caller's own mesh too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    reference = build(layers=LAYERS)
    pipe = shard(copy.deepcopy(reference), policy=TinyPolicy, device_mesh=mesh, num_microbatches=4)
    assert abs(float(whole_step(reference, labelled())) - float(pipe.train_step(labelled()))) <= 1e-12
    names = dict(reference.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
    for name, parameter in pipe.named_parameters():
        close(names[name].grad, whole(parameter.grad), name, scale=scale)


def test_a_mesh_of_the_callers(pool):
    pool.run(on_a_mesh, world=4)
