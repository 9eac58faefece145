"""What the tests of this pack share: policies, twins, and speech that a tiny Whisper can learn in seconds."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shard_whisper.cases import build, inputs
from shardcore_testing import hidden_loss
from shardcore_testing.pack import policy_of, shard_by, step_beside

#: Before transformers 5 the unsharded model cannot do it (`shard_whisper.cases`).
REENTRANT = Version(transformers.__version__) >= Version("5")
#: How gradient checkpointing is turned on, where the unsharded model can do it.
CHECKPOINTS = [None, {"use_reentrant": False}] + [{"use_reentrant": True}] * REENTRANT

_MELS, _LENGTH, _FRAMES_EACH = 8, 6, 3
_FIRST = 3  # the token of the lowest tone, after those for padding, start and end


PLUGIN = "shard_whisper.plugin"
policy = functools.partial(policy_of, PLUGIN)
shard = functools.partial(shard_by, PLUGIN)


def pair(name: str = "WhisperForConditionalGeneration", **options: Any) -> tuple[Any, Any]:
    """Return an unsharded model in training mode and its sharded twin."""
    reference = build(name, **options).double().train()
    return reference, shard(copy.deepcopy(reference))


def loss_of(out: Any) -> Tensor:
    """Return the model's loss, or one for the bare model."""
    return out.loss if "loss" in out else hidden_loss(out)


def compare(
    reference: Any, sharded: Any, *, seeds: tuple[int, ...] = (0, 1), tolerance: float = 1e-12, **call: Any
) -> None:
    """Run both on batches, compare the outputs and the loss, and run both backwards: gradients add up."""
    for seed in seeds:
        step_beside(reference, sharded, inputs(reference, seed), loss_of, tolerance=tolerance, **call)


def speech(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return mel features (rows, mels, frames) of tones over some noise, and the tokens (rows, 6) that they spell.

    No token comes twice in a row of tokens, so that a model which repeats itself cannot be right.
    """
    generator = torch.Generator().manual_seed(seed)
    tones = torch.stack([torch.randperm(_MELS, generator=generator)[:_LENGTH] for _ in range(rows)])
    heard = torch.nn.functional.one_hot(tones.repeat_interleave(_FRAMES_EACH, 1), _MELS).mT  # (rows, mels, 18)
    features = torch.randn(rows, _MELS, 22, generator=generator) * 0.1
    features[:, :, : heard.shape[2]] += heard
    return features.to(dtype), tones + _FIRST


def trained(steps: int = 250) -> Any:
    """Return a Whisper that has learnt, unsharded, to write down what the tones spell."""
    torch.manual_seed(0)
    model = build("WhisperForConditionalGeneration", init_std=0.1).train()
    model.apply(model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    ends = torch.full((32, 1), model.config.eos_token_id)
    for step in range(steps):
        features, tokens = speech(32, 1000 + step)
        model(input_features=features, labels=torch.cat([tokens, ends], 1)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()
