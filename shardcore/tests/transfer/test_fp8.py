"""Eight bits between stages and in FSDP2's gathers: the rounding that is promised, and nothing else."""

from __future__ import annotations

import copy
from pipes import LAYERS, close, pipeline

import pytest
import torch
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build

from shardcore.api import shard
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import whole

ROWS, LENGTH, HIDDEN = 8, 8, 32


def rounded(x, form=torch.float8_e4m3fn):
    """What arrives of ``x``, which travels as one part."""
    scale = x.abs().max().float() / torch.finfo(form).max
    return ((x.float() / scale).to(form).float() * scale).to(x.dtype)


class Crossing(torch.autograd.Function):
    """What the next stage computes with, and what comes back."""

    @staticmethod
    def forward(ctx, x):
        return rounded(x)

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad, torch.float8_e5m2)


def _same_gradients(reference, model):
    # Some true gradients are zero, so that an error counts against the largest of all.
    scale = max(float(parameter.grad.abs().max()) for parameter in reference.parameters())
    for name, parameter in model.named_parameters():
        close(reference.get_parameter(name).grad, whole(parameter.grad), name, scale=scale)


def between_stages(schedule, cuts):
    reference = build(layers=LAYERS)
    exact = copy.deepcopy(reference)
    pipe = pipeline(copy.deepcopy(reference), pipeline_schedule=schedule, fp8_communication=True)
    for cut in cuts:
        reference.model.layers[cut].register_forward_pre_hook(lambda _, args: (Crossing.apply(args[0]),))
    ids = batch(0, ROWS, LENGTH)
    losses = [reference(part, labels=part) / 4 for part in ids.chunk(4)]
    sum(losses).backward()
    with Collectives() as sent:
        loss = pipe.train_step({"ids": ids, "labels": ids})
    close(sum(losses), loss, "loss")
    assert abs(float(loss) - float(exact(ids, labels=ids).detach())) > 1e-6, "nothing was rounded"
    _same_gradients(reference, pipe)
    close(sum(losses), pipe.eval_step({"ids": ids, "labels": ids}), "without gradients")
    return [size for name, size in zip(sent.names, sent.bytes, strict=True) if name == "c10d::send"]


@PIPELINES
@pytest.mark.parametrize(("schedule", "cuts"), [("1f1b", [2]), ("zbv", [1, 2, 3])])
def test_stages_send_rounded_activations_and_gradients(pool, schedule, cuts):
    sizes = pool.run(between_stages, schedule, cuts, world=2)[0]
    bfloat16 = 2 * ROWS // 4 * LENGTH * HIDDEN
    assert sizes
    assert max(sizes) <= 0.51 * bfloat16


def gathered(options):
    ranks = dist.get_world_size()
    exact = build(layers=LAYERS, tied=True)
    model = shard(copy.deepcopy(exact), policy=TinyPolicy, dp=ranks, fp8_communication=True, **options)
    reference = copy.deepcopy(exact)
    blocks = [[*layer.parameters()] for layer in reference.model.layers]
    others = {*reference.parameters()} - {p for unit in blocks for p in unit}
    with torch.no_grad():
        for unit in (*blocks, others):
            for parts in zip(*(p.chunk(ranks) for p in unit), strict=True):
                travels = rounded(torch.cat([part.flatten() for part in parts]))
                for part, value in zip(parts, travels.split([part.numel() for part in parts]), strict=True):
                    part.copy_(value.view(part.shape))
    ids = batch(0, 2 * ranks, LENGTH)
    reference(ids, labels=ids).backward()
    own = ids[2 * dist.get_rank() :][:2]
    with Collectives() as sent:
        model(own, labels=own).backward()
    for name, parameter in model.named_parameters():
        close(exact.get_parameter(name), parameter.full_tensor(), f"{name} itself")
    _same_gradients(reference, model)
    return sum(size for name, size in zip(sent.names, sent.bytes, strict=True) if "allgather" in name)


@pytest.mark.parametrize("options", [{}, {"wrap": {"reshard_after_forward": False}}])
def test_parameters_are_gathered_rounded(pool, options):
    model = build(layers=LAYERS, tied=True)
    numbers = sum(p.numel() for p in model.parameters())
    if not options:  # blocks are gathered again for the backward
        numbers += sum(p.numel() for p in model.model.layers.parameters())
    for size in pool.run(gathered, options, world=2):
        assert numbers <= size <= 0.51 * 2 * numbers
