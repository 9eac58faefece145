"""What fails on one rank of a pipeline fails on all, and the next step trains; what cannot begin is refused."""

from __future__ import annotations

import copy
from pipes import LAYERS, close, engine, labelled, pipeline, whole_step
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build
from torch import Tensor, nn

from shardcore.errors import AgreementError, ConfigError, NotSupportedError

pytestmark = PIPELINES


def fails(where: str, schedule: str) -> None:
    model = build(layers=LAYERS)
    reference = copy.deepcopy(model)
    broken = {"now": False}

    def loss(out: Tensor, arguments: Any) -> Tensor:
        if broken["now"] and where == "loss":
            raise ValueError("no such loss")
        return out

    pipe = pipeline(model, pipeline_schedule=schedule)
    last = dist.get_rank() == dist.get_world_size() - 1
    block = pipe.model.layers[engine(pipe).cut.held(engine(pipe).stages[-1].index)[0]]

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if broken["now"] and last and where == "backward":
                raise ValueError("no such gradient")
            return grad

    def hook(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        if broken["now"] and last and where == "forward":
            raise ValueError("no such block")
        return Breaks.apply(out)

    block.register_forward_hook(hook)
    call = labelled()
    if where == "data" and not last:
        call = {**call, "ids": call["ids"][:, :-1]}
    if where == "values" and not last:
        call = {**call, "ids": (call["ids"] + 1) % 97}
    broken["now"] = True
    said = r"no such|the shapes of the batch|tensor 0 of the batch|eval_step\(batch\) for the loss alone"
    with (
        pytest.raises((ValueError, RuntimeError, NotSupportedError), match=said),
        torch.set_grad_enabled(last or where != "no gradients"),
    ):
        pipe.train_step(call, loss=loss)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    broken["now"] = False
    assert abs(float(pipe.train_step(labelled())) - float(whole_step(reference, labelled()))) <= 1e-12
    names = dict(reference.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
    for name, parameter in pipe.named_parameters():
        close(names[name].grad, parameter.grad, name, scale=scale)


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("interleaved", "zbv"))]
)
@pytest.mark.parametrize("where", ["forward", "backward", "loss", "data", "values", "no gradients"])
def test_a_failure_of_one_rank_is_one_on_all(pool, where, schedule):
    pool.run(fails, where, schedule, world=2)


def fails_in_one_replica() -> None:
    pipe = pipeline(build(layers=LAYERS), pp=2, dp=2)

    def given() -> dict[str, Tensor]:
        if dist.get_rank() == 3:
            raise ValueError("no more batches")
        return labelled()

    with pytest.raises((ValueError, AgreementError), match="no more batches"):
        pipe.train_step(given)
    assert pipe.train_step(labelled()).isfinite()


def test_a_batch_that_one_rank_of_a_replica_lacks(pool):
    pool.run(fails_in_one_replica, world=4)


def fails_in_evaluation() -> None:
    pipe = pipeline(build(layers=LAYERS), pipeline_schedule="interleaved")

    def raises(*_: Any) -> None:
        raise ValueError("no such block")

    handle = None
    if dist.get_rank() == 0:
        handle = pipe.model.layers[0].register_forward_hook(raises)
    with pytest.raises((ValueError, AgreementError), match="no such block"):
        pipe.eval_step(labelled())
    if handle is not None:
        handle.remove()
    assert pipe.eval().eval_step(labelled()).isfinite()


def test_a_failure_in_evaluation(pool):
    pool.run(fails_in_evaluation, world=2)


def differing() -> None:
    rank = dist.get_rank()
    with pytest.raises(AgreementError, match="the values of"):
        pipeline(build(seed=rank, layers=LAYERS))
    with pytest.raises(AgreementError, match=r"ShardConfig.pipeline_schedule"):
        pipeline(build(layers=LAYERS), pipeline_schedule=("1f1b", "gpipe")[rank])
    with pytest.raises(ConfigError, match="cannot fill 2 stages"):
        pipeline(build(layers=1))

    class Uncut(TinyPolicy):
        stages = None

    with pytest.raises(NotSupportedError, match="does not say where it can be cut"):
        pipeline(build(layers=LAYERS), Uncut)
    with pytest.raises(ConfigError, match="a batch without rows has no micro-batches"):
        pipeline(build(layers=LAYERS)).train_step({"ids": batch(0, 1, 4)[:0]})


def test_what_cannot_begin(pool):
    pool.run(differing, world=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_schedule": "2f2b"}, r"pipeline_schedule must be one of None, 'gpipe', '1f1b'.* got '2f2b'"),
        ({"pipeline_schedule": "zbv", "num_model_chunks": 3}, "'zbv' has 2 stages on each rank"),
        ({"num_model_chunks": 2}, "'1f1b' has 1 stages on each rank"),
        ({"microbatch_size": 2}, "give one of them"),
        ({"pipeline_bounds": (0, 4, 4)}, "cannot begin at"),
        ({"wrap": {"reshard_after_forward": True}, "pipeline_schedule": "zbv", "pp": 1, "dp": 2}, "says nothing"),
        ({"pp": 1}, "without a pipeline says nothing"),
        ({"pp": 3}, "does not divide the number of ranks"),
        ({"loss_chunk_size": 4, "parallel_output": True}, "is not supported"),
    ],
    ids=lambda value: next(iter(value.values()), "") if isinstance(value, dict) else "",
)
def test_settings(pool, settings, said):
    pool.run(_refused, settings, said, world=2)


def _refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, NotSupportedError), match=said):
        pipeline(build(layers=LAYERS), **settings)


def nothing_to_learn(kind: str) -> None:
    model = build(layers=LAYERS)
    reference = copy.deepcopy(model)
    for net in (model, reference):
        for name, parameter in net.named_parameters():
            parameter.requires_grad_("layers.0." in name)
    pipe = pipeline(model)
    if kind == "detached":
        with pytest.raises((ConfigError, AgreementError), match="has no gradient"):
            pipe.train_step(labelled(), loss=lambda out, _: out.detach())
        return
    # The last stage is frozen, and has micro-batches without a share: those without labels, and fillers.
    nothing = labelled()
    nothing["labels"] = torch.full_like(nothing["labels"], -100)
    assert float(pipe.train_step(nothing)) == 0.0
    for call in (labelled(), labelled(rows=5)):
        assert abs(float(pipe.train_step(call)) - float(whole_step(reference, call))) <= 1e-12
    names = dict(reference.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in names.values() if parameter.requires_grad)
    for name, parameter in pipe.named_parameters():
        if parameter.requires_grad:
            close(names[name].grad, parameter.grad, name, scale=scale)


@pytest.mark.parametrize("kind", ["detached", "frozen"])
def test_losses_that_teach_nothing(pool, kind):
    pool.run(nothing_to_learn, kind, world=2)


def interrupted() -> None:
    pipe = pipeline(build(layers=LAYERS))
    wanted = float(pipe.train_step(labelled()))
    pipe.zero_grad()
    calls = []

    def interrupt(module: nn.Module, args: Any) -> None:
        calls.append(module)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise KeyboardInterrupt

    handle = pipe.model.layers[engine(pipe).cut.held(dist.get_rank())[0]].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt if dist.get_rank() else AgreementError):
        pipe.train_step(labelled())
    handle.remove()
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert float(pipe.train_step(labelled())) == wanted


def test_an_interrupt_on_one_rank_ends_the_step_on_all(pool):
    pool.run(interrupted, world=2, timeout=20)


def cannot() -> None:
    pipe = pipeline(build(layers=LAYERS))
    wanted = float(pipe.train_step(labelled()))
    for cast in (pipe.float, pipe.bfloat16, lambda: pipe.to(torch.float32)):
        with pytest.raises(NotSupportedError, match=r"a cast from torch.float64 to torch"):
            cast()
    with pytest.raises(NotSupportedError, match=r"copy.deepcopy; copy the model before shard\(\)"):
        copy.deepcopy(pipe)
    with pytest.raises(NotSupportedError, match=r"copy.copy; use the model itself"):
        copy.copy(pipe)
    assert pipe.to("cpu") is pipe.double() is pipe
    assert float(pipe.train_step(labelled())) == wanted


def test_what_no_pipeline_can_do(pool):
    pool.run(cannot, world=2)


def reentrant(schedule: str) -> None:
    pipe = pipeline(build(layers=LAYERS, checkpoint="reentrant"), pipeline_schedule=schedule)
    with pytest.raises((NotSupportedError, AgreementError), match=r"layers.0 is called in .* say use_reentrant=False"):
        pipe.train_step(labelled())
    assert pipe.eval().eval_step(labelled()).isfinite()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # what crosses is found out without
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_blocks_in_a_reentrant_checkpoint_are_refused(pool, schedule):
    """The loss would be right, and gradients of all stages but the last one wrong, or none."""
    pool.run(reentrant, schedule, world=2)
