"""What a step is made of besides the model and the mesh: sizes, numbers, and what steps the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardcore.errors import ConfigError, NotSupportedError, ShardcoreError
from shardcore.plugins.isolation import in_one_line
from shardcore_planner.cards import Card

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

Make = Callable[..., Optimizer]
#: What a step can be planned for.
DEVICES = ("cuda", "cpu")
_MOMENTUM = 0.9

#: What makes each optimizer, from parameters and ``foreach``; None for inference.
OPTIMIZERS: dict[str, Make | None] = {
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-4, **options),
    "adamw-fused": lambda parameters, foreach: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-4, **options),
    "sgd-momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-4, momentum=_MOMENTUM, **options),
    "none": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What runs on each data-parallel replica in one step.

    Attributes:
        batch: samples.
        seq: tokens of a sample; None takes what the model is made for.
        dtype: of parameters, gradients, activations and optimizer state: a key of `DTYPES`. None takes what the
            configuration of the model says, or else bf16.
        optimizer: a key of `OPTIMIZERS`; ``"none"`` is inference, a forward without gradients.
        master_weights: the optimizer has a copy of this rank's parameters in float32, and its state is in float32 too.
        lora: the rank of PEFT's adapters on all linears, which are all that is trained; None trains every parameter.
        device: what computes, ``"cuda"`` or ``"cpu"``. On CUDA some operations are one kernel that keeps less, and the
            optimizer steps all parameters together, as torch does there by default: with temporary tensors as large as
            all parameters of the rank. On the CPU it steps one after the other; a fused optimizer does neither.
        card: how fast that is, where the time of a step is asked for.

    Raises:
        ConfigError: a value is none of these, or the card is no ``device``.
    """

    batch: int = 1
    seq: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    master_weights: bool = False
    lora: int | None = None
    device: str = "cuda"
    card: Card | None = None

    def __post_init__(self) -> None:
        words = (
            ("dtype", self.dtype, DTYPES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("device", self.device, DEVICES),
        )
        for name, value, known in words:
            if value is not None and value not in known:
                raise ConfigError(f"Workload.{name} must be one of {', '.join(known)}; got {value!r}")
        for name, size in (("batch", self.batch), ("seq", self.seq), ("lora", self.lora)):
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(f"Workload.{name} must be a positive integer, got {size!r}")
        if self.card is not None and self.card.device != self.device:
            raise ConfigError(f"Workload.card is {self.card.name}, a {self.card.device}, and device is {self.device!r}")
        if self.master_weights and self.optimizer == "none":
            raise ConfigError("Workload.master_weights are an optimizer's, and optimizer is 'none'; leave one of them")
        if self.lora and self.optimizer == "none":
            raise ConfigError("Workload.lora trains adapters, and optimizer 'none' is inference; leave one of them")

    def of(self, model: nn.Module) -> Workload:
        """Return the same with the dtype of a model, where none is given."""
        said = getattr(getattr(model, "config", None), "dtype", None)
        found = next((name for name, known in DTYPES.items() if known == said), "bf16")
        return self if self.dtype else replace(self, dtype=found)

    @property
    def torch_dtype(self) -> torch.dtype:
        """That of torch."""
        return DTYPES[self.dtype or "bf16"]

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return OPTIMIZERS[self.optimizer] is not None

    @property
    def copies(self) -> float:
        """How many times the bytes of the parameters the gradients, optimizer state and they take, at least."""
        if not self.trains or self.lora:
            return 1
        wide = torch.float32.itemsize / self.torch_dtype.itemsize if self.master_weights else 1
        return 2 + _MOMENTS[self.optimizer] * wide + (wide if self.master_weights else 0)


#: How often each optimizer keeps something of the size of the parameters.
_MOMENTS = {"adamw": 2, "adamw-fused": 2, "sgd": 0, "sgd-momentum": 1, "none": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a model is called.

    Attributes:
        inputs: makes the keyword arguments (or, under ``""``, the only positional one) on the default device.
        loss: finds a loss in what the model returns for them.
        seq: the tokens of a sample; None where the model has no use for the number.
    """

    inputs: Callable[[], Mapping[str, Any]]
    loss: Callable[[Any], Tensor]
    seq: int | None = None

    def forward(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Return what the model returns.

        Raises:
            NotSupportedError: it fails.
        """
        try:
            return model(inputs[""]) if "" in inputs else model(**inputs)
        except ShardcoreError:
            raise
        except Exception as error:
            raise NotSupportedError(
                f"a step of {type(model).__name__} cannot be planned: its forward fails on tensors that hold nothing "
                f'({in_one_line(error)}); plan with another --dtype, or say "attn_implementation": "eager" or '
                'another "experts_implementation" in its config.json'
            ) from error


class Stepper:
    """The optimizer of a workload; it has its state after the first step.

    Args:
        model: the sharded model.
        workload: names the optimizer.
    """

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        make = OPTIMIZERS[workload.optimizer]
        masters = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in self.parameters]
        self._masters = masters if workload.master_weights else []
        stepped = self._masters or self.parameters
        self._optimizer = make(stepped, foreach=workload.device == "cuda") if make and stepped else None

    def state(self) -> Iterator[Tensor]:
        """Yield what the optimizer holds on this rank."""
        yield from self._masters
        states: Iterable[Any] = () if self._optimizer is None else self._optimizer.state.values()
        for state in states:
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the parameters have now."""
        return [p.grad for p in (*self.parameters, *self._masters) if p.grad is not None]

    def step(self) -> None:
        """Step the parameters and let their gradients go."""
        if self._optimizer is None:
            return
        for master, parameter in zip(self._masters, self.parameters, strict=False):
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self.parameters, strict=False):
                parameter.copy_(master)
                parameter.grad = None
        self._optimizer.zero_grad()
