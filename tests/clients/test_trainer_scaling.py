"""What fp16=True adds to a training: losses are scaled, and a step whose gradients are infinite is left out.

Accelerate computes in float16 on accelerators alone and makes no scaler on a CPU, sharded or not. Here it is given one,
and the products stay in float64, so that scaling by powers of two changes nothing. Norms and losses are in float32, as
the scaler is.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardcore

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainings_by_clients import arguments, llama, parameters, words  # from support/

TP2 = {"tp": 2}
TP2DP2 = {"tp": 2, "dp": 2}


def scaled(folder: str, mesh: dict[str, Any] | None) -> dict[str, Any]:
    """Train with a scaler; after the second backward one value of the last rank's gradients is infinite."""
    from accelerate.utils import AutocastKwargs

    from shardcore_trainer import Trainer

    model = shardcore.shard(llama(), **mesh) if mesh else llama()
    args = arguments(
        folder, max_grad_norm=0.3, per_device_train_batch_size=4 // (mesh or {}).get("dp", 1), use_cpu=True, fp16=True
    )
    trainer = Trainer(model=model, args=args, train_dataset=words(20))
    accelerator = trainer.accelerator
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.scaler is None
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    accelerator.native_amp, accelerator.autocast_handler = True, AutocastKwargs(enabled=False)
    native, scales = accelerator.backward, []

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        native(loss, **kwargs)
        scales.append(accelerator.scaler.get_scale())
        if len(scales) == 2 and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
            grad = model.lm_head.weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[-1, -1] = math.inf

    accelerator.backward = backward
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "said": [(row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows],
        "scales": [*scales, accelerator.scaler.get_scale()],
        "parameters": parameters(model),
    }


@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_a_scaler_scales_and_leaves_out_steps_on_all_ranks(pool, tmp_path, mesh):
    (wanted,) = pool.run(scaled, str(tmp_path), None, world=1)
    assert wanted["scales"] == [1024.0, 2048.0, 1024.0, 2048.0, 4096.0, 8192.0]
    for got in pool.run(scaled, str(tmp_path), mesh, world=mesh["tp"] * mesh.get("dp", 1)):
        assert got["scales"] == wanted["scales"]
        for mine, other in zip(got["said"], wanted["said"], strict=True):
            assert mine == pytest.approx(other, rel=1e-5, nan_ok=True)
        for name, parameter in wanted["parameters"].items():
            torch.testing.assert_close(got["parameters"][name], parameter, rtol=1e-6, atol=1e-6)
