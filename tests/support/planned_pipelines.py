"""What one step of a pipeline takes, and the same step run on real ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from planned_models import build, config_of

import shardcore
from shardcore.mesh.context import context_of
from shardcore.pipeline.engine import pipeline_of
from shardcore_planner import Workload
from shardcore_planner.calls import call_of
from shardcore_planner.rank_step import arguments_of
from shardcore_planner.step import groups_of
from shardcore_planner.watch import KINDS, Watch
from shardcore_planner.workload import Stepper

WORKLOAD = Workload(batch=8, seq=7, dtype="fp32", device="cpu")


def ran(name: str, **fields: Any) -> dict[str, Any]:
    """Run steps on this rank; return what was held and sent in the last one, and the most that was alive."""
    torch.manual_seed(0)
    model = build(name)
    shardcore.shard(model, config_of(**fields))
    stepper, call = Stepper(model, WORKLOAD), call_of(model, WORKLOAD)
    batch = arguments_of(model, call.inputs())

    def loss(out: Any, _: Any) -> torch.Tensor:  # one: another one is traced, and has a schedule of its own
        return call.loss(out)

    for _ in range(2):
        model.train_step(batch, loss=loss)
        stepper.step()
    watch, sends = Watch(), Counter[str]()
    watch.owns("parameters", model.parameters())
    watch.owns("optimizer", stepper.state())
    watch.owns("activations", [*batch.values(), *model.buffers(), *_buffers(model)])
    watch.finds_gradients(stepper.gradients)
    with watch:
        model.train_step(batch, loss=loss)
        held = watch.now()
        watch.phase = "optimizer"
        stepper.step()
    groups = groups_of(context_of(model))
    for (_, operation, group, unit), size in watch.sent.items():
        axis = groups[group][0] if group in groups else ""  # what ranks agree on, and the loss, are not of the plan
        if (operation == "send" or axis not in ("", "pp")) and operation != "recv":
            sends[f"{operation} {axis} {unit}"] += size
    peak = max(size for key, size in watch.peaks.items() if key[2] == "all")
    return {"held": {kind: held[kind] for kind in KINDS[:3]}, "sent": dict(sends), "peak": peak}


def _buffers(model: Any) -> list[torch.Tensor]:
    """Return what torch's stages receive in."""
    (_, stages, _), *_ = pipeline_of(model)._schedules.values()
    infos = [i for s in stages for some in (s.args_recv_info, s.grad_recv_info) for of in some.values() for i in of]
    return [info.buffer for info in infos if info.buffer is not None]


def sent(traffic: Any) -> dict[str, int]:
    """Return what a plan says of the same."""
    found: Counter[str] = Counter()
    for t in traffic:
        operation = "send" if t.operation == "exchange" else t.operation
        found[f"{operation} {t.axis} count"] += t.count
        found[f"{operation} {t.axis} bytes"] += t.bytes
    return dict(found)
