"""Adapters of PEFT: attached before or after the model is sharded, trained, and saved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import shardcore
import shardcore_peft as sharded_peft
from draws import Draw
from models import build
from training import Sharded, Whole

__all__ = ["Adapted", "AdaptedWhole", "with_adapters"]


def with_adapters(draw: Draw) -> Any:
    """Return an unsharded model with adapters that do something: those that begin with zeros get values."""
    model = peft.get_peft_model(build(draw), peft.LoraConfig(**draw.how["lora"]))
    generator = torch.Generator().manual_seed(draw.number + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + float(parameter.ndim == 1))
    return model.double().train()


class AdaptedWhole(Whole):
    """The unsharded model with adapters."""

    def evaluated(self) -> dict[str, Tensor]:
        """Return what a call gives, and what is saved."""
        values = super().evaluated()
        with self.model.disable_adapter():
            values |= {f"{name} without": value for name, value in self.forward().items()}
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            return values | {f"saved {n}": t for n, t in load_file(Path(folder, "adapter_model.safetensors")).items()}

    def save(self, folder: Path) -> None:
        """Save what is trained."""
        self.model.save_pretrained(folder)


class Adapted(AdaptedWhole, Sharded):
    """The sharded model with adapters."""

    def shard(self) -> None:
        """Shard the model with its adapters, or load these into a sharded one."""
        options = {**self.draw.mesh, **self.draw.fields}
        if self.draw.how["attached"] == "before":
            shardcore.shard(self.model, **options)
            return
        base = shardcore.shard(build(self.draw), **options)
        with tempfile.TemporaryDirectory() as folder:
            place = _of_first(folder)
            if dist.get_rank() == 0:
                self.model.save_pretrained(place)
            dist.barrier()
            self.model = sharded_peft.from_pretrained(base, place, is_trainable=True).train()
            dist.barrier()

    def save(self, folder: Path) -> None:
        """Let all ranks save into the folder of the first one; each keeps a copy of what is there."""
        place = Path(_of_first(str(folder)))
        self.model.save_pretrained(place)
        dist.barrier()
        if place != folder:
            Path(folder, "adapter_model.safetensors").write_bytes((place / "adapter_model.safetensors").read_bytes())
        dist.barrier()


def _of_first(folder: str) -> str:
    box = [folder]
    dist.broadcast_object_list(box, src=0)
    return box[0]
