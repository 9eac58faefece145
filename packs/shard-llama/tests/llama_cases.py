"""Tiny Llamas, batches, and training beside the unsharded model: what the tests of this pack share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shard_llama.policy as policies
import shardcore
from shard_llama import cases
from shardcore.comm.dtensor_params import local_tensor
from shardcore_testing import hidden_loss
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole

Batch = dict[str, Tensor]

BEFORE_5_5 = Version(transformers.__version__) < Version("5.5")

#: What each class returns besides the loss.
OUTPUTS = ("last_hidden_state", "logits", "start_logits", "end_logits")


def build(name: str = "LlamaForCausalLM", *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a Llama whose every parameter, biases too, is drawn from N(0, 0.2)."""
    settings = {"num_labels": 2, "tie_word_embeddings": False, "classifier_dropout": None, **options}
    model = cases.build(name, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(dtype)


def shard(model: Any, **options: Any) -> Any:
    """Shard ``model`` by the pack's policy; over all ranks along ``tp`` unless told otherwise."""
    return shardcore.shard(model, policy=policies.LlamaPolicy, **(options or {"tp": dist.get_world_size()}))


def pair(name: str = "LlamaForCausalLM", *, tp: int | None = None, dp: int = 1, **options: Any) -> tuple[Any, Any]:
    """Return an unsharded model and its sharded twin."""
    reference = build(name, **options)
    return reference, shard(copy.deepcopy(reference), tp=tp or dist.get_world_size(), dp=dp)


def batch(model: Any, seed: int = 0, *, rows: int = 3, length: int = 8, pads: tuple[int, ...] = (0, 3, 1)) -> Batch:
    """Return right-padded inputs with labels for ``model``; ``pads`` counts the padding of each row."""
    generator = torch.Generator().manual_seed(seed)
    kind, config = type(model).__name__.removeprefix("FSDP"), model.config
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, length - pads[row % len(pads)] :] = 0
    ids = torch.randint(1, config.vocab_size, (rows, length), generator=generator) * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    labels = torch.randint(0, max(config.num_labels, 1), (rows, length), generator=generator)
    match kind:
        case "LlamaForCausalLM":
            return {**inputs, "labels": ids.masked_fill(mask == 0, -100)}
        case "LlamaForSequenceClassification":
            return {**inputs, "labels": labels[:, 0]}
        case "LlamaForTokenClassification":
            return {**inputs, "labels": labels.masked_fill(mask == 0, -100)}
        case "LlamaForQuestionAnswering":
            starts = torch.randint(0, 3, (rows,), generator=generator)
            return {**inputs, "start_positions": starts, "end_positions": starts + 1}
    return inputs


def loss_of(out: Any) -> Tensor:
    """Return the model's loss, or for the bare decoder a weighted mean of its hidden states."""
    if getattr(out, "loss", None) is not None:
        return out.loss
    return hidden_loss(out)


def outputs_of(out: Any) -> dict[str, Tensor]:
    """Return the tensors that the class of the model promises."""
    return {name: out[name] for name in OUTPUTS if name in out}


def compare_forward(reference: Any, sharded: Any, inputs: Batch, tolerance: float = 1e-12, **call: Any) -> None:
    """Run both, compare the outputs and the loss, and run both backwards."""
    wanted, got = reference(**inputs, **call), sharded(**inputs, **call)
    assert type(wanted) is type(got)
    assert outputs_of(wanted).keys() == outputs_of(got).keys() != set()
    for name, tensor in outputs_of(wanted).items():
        assert not isinstance(got[name], DTensor)
        assert_close(tensor, got[name], name, tolerance)
    assert_close(loss_of(wanted), loss_of(got), "loss", tolerance)
    loss_of(wanted).backward()
    loss_of(got).backward()


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    """Return AdamW with a large step, so that three steps move far."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def train_beside(
    reference: Any,
    sharded: Any,
    *,
    steps: int = 3,
    micro_batches: int = 2,
    max_norm: float = 0.05,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    tolerance: float = 1e-12,
) -> None:
    """Train both on the same micro-batches of different padding; everything is compared in every step."""
    optimizers = optimizer(reference), optimizer(sharded)
    paddings = ((0, 3, 1), (2, 0, 5), (4, 4, 0))
    for step in range(steps):
        for micro in range(micro_batches):
            inputs = batch(reference, 10 * step + micro, pads=paddings[(step + micro) % 3])
            compare_forward(reference, sharded, inputs, tolerance)
        assert_same_gradients(reference, sharded, tolerance)
        clip_and_step((reference, sharded), optimizers, max_norm, tolerance)
        assert_same_parameters(reference, sharded, tolerance)


def clip_and_step(
    models: tuple[Any, Any], optimizers: tuple[Optimizer, Optimizer], max_norm: float, tolerance: float = 1e-12
) -> None:
    """Clip to a norm below the true one, compare the norms, step."""
    norms = [whole(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)) for model in models]
    assert norms[0] > max_norm
    assert_close(norms[0], norms[1], "gradient norm", tolerance)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def is_checkpointing(model: Any) -> bool:
    """Tell what the model says about itself."""
    new_name = hasattr(model, "activation_checkpointing_enable")
    return bool(model.is_activation_checkpointing if new_name else model.is_gradient_checkpointing)


def assert_no_empty_part(model: nn.Module) -> None:
    """Raise unless every parameter is a DTensor of which this rank holds something."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is a plain {type(parameter).__name__}"
        assert local_tensor(parameter).numel() > 0, f"{name} {tuple(parameter.shape)} has an empty part"


class SavesTooLittle(policies.LlamaPolicy):
    """A policy that is wrong: what it shards saves itself without one tensor."""

    def postprocess(self) -> None:
        self.model._keys_to_ignore_on_save = ["model.norm.weight"]
