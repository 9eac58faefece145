"""One step of a pipeline: a batch in micro-batches, and those of one form together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError
from shardcore.pipeline.batches import shapes_of
from shardcore.pipeline.script import Script

__all__ = [
    "Fed",
    "Loss",
    "Run",
    "Scaled",
    "Step",
    "Weight",
    "checked",
    "named",
    "own_loss",
    "runs_of",
    "unscaled",
    "wide",
]

#: Returns the loss of a model's output and the arguments of its call.
Loss: TypeAlias = Callable[[Any, Mapping[str, Any]], Tensor]

#: Returns over how many items the loss of a micro-batch is a mean.
Weight: TypeAlias = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A loss times a number, as half precision needs it.

    Attributes:
        loss: the loss.
        factor: the number.
    """

    loss: Loss
    factor: float

    def __call__(self, out: Any, arguments: Mapping[str, Any]) -> Tensor:
        """Return it."""
        return wide(self.loss(out, arguments)) * self.factor


def wide(loss: Tensor) -> Tensor:
    """Return a loss in float32 at least: a scale does not fit into less."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def unscaled(loss: Loss) -> Loss:
    """Return what is multiplied, if anything is."""
    return loss.loss if isinstance(loss, Scaled) else loss


def named(loss: Loss | None) -> str:
    """Name a function by its code and what it holds: it may be made anew in each step, and may hold something else."""
    of: Any = None if loss is None else unscaled(loss)
    if (code := getattr(of, "__code__", None)) is None:
        return repr(of)
    held = [cell.cell_contents for cell in of.__closure__ or ()]
    held += [*(of.__defaults__ or ()), *(of.__kwdefaults__ or {}).values()]
    plain = (str, int, float, bool, type(None))
    return f"{code} {[value if isinstance(value, plain) else (type(value), id(value)) for value in held]}"


def checked(loss: Loss, arguments: Mapping[str, Any]) -> Callable[[Any], Tensor]:
    """Return what computes the loss, as it is before it is scaled, of an output of a call.

    Raises:
        ConfigError: when it is called: the loss is no tensor ().
    """

    def computed(out: Any) -> Tensor:
        value: Any = unscaled(loss)(out, arguments)
        if not isinstance(value, Tensor) or value.ndim:
            got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"the loss is {got}; loss= (of a Booster, its criterion) is to return a tensor ()")
        return value

    return computed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Micro-batches of one form, which a schedule runs: its stages say beforehand what they send.

    Attributes:
        first: the number of the first of them in the step.
        count: how many they are.
        key: names their form.
        script: of them.
    """

    first: int
    count: int
    key: str
    script: Script

    def numbers(self, count: int) -> list[int]:
        """Return what a schedule of ``count`` micro-batches is fed with: their numbers, then those of fillers.

        A schedule may need more of them than there are. A filler is a micro-batch once more, without a share in the
        loss; its number is that one's complement.
        """
        return [*range(self.first, self.first + self.count), *[~self.first] * (count - self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """One micro-batch.

    Attributes:
        arguments: of the call.
        share: its part in the loss of the batch.
        run: with which it runs.
    """

    arguments: Mapping[str, Any]
    share: float
    run: Run


class Step:
    """One step that is running.

    Args:
        feed: the micro-batches.
        loss: of an output.

    Attributes:
        seed: of what is drawn in it.
        losses: what micro-batches added to the loss, on the last stage.
        outputs: of micro-batches by their numbers, on the last stage, if they are asked for.
    """

    def __init__(self, feed: Sequence[Fed], loss: Loss) -> None:
        self.feed, self.loss, self.seed = feed, loss, 0
        self.losses: list[Tensor] = []
        self.outputs: dict[int, Any] | None = None

    @property
    def runs(self) -> list[Run]:
        """The runs, in their order."""
        return list(dict.fromkeys(fed.run for fed in self.feed))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the loss."""
        loss = self.feed[0].run.script.loss
        return torch.get_default_dtype() if loss is None else loss.dtype

    def __getitem__(self, number: int) -> Fed:
        """Return the micro-batch of a number, or the one of which a filler is a copy."""
        return self.feed[number if number >= 0 else ~number]


def runs_of(
    parts: Sequence[Mapping[str, Any]],
    script: Callable[[str, Sequence[Mapping[str, Any]]], Script],
    prefix: str,
) -> list[Run]:
    """Return with what each micro-batch runs.

    Args:
        parts: the arguments of each.
        script: returns the script for a key, made with any of these arguments.
        prefix: what the key says besides the form.
    """
    keys = [f"{prefix} {shapes_of(part)}" for part in parts]
    runs = {}
    for key in dict.fromkeys(keys):
        alike = [part for part, other in zip(parts, keys, strict=True) if other == key]
        runs[key] = Run(first=keys.index(key), count=len(alike), key=key, script=script(key, alike))
    return [runs[key] for key in keys]


def own_loss(out: Any, arguments: Mapping[str, Any]) -> Tensor:
    """Return the loss that a model has computed itself.

    Raises:
        ConfigError: it has computed none.
    """
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ConfigError(
            f"a {type(out).__name__} has no loss; pass labels, or give loss=, a function of the output and the batch "
            "(of a Booster, its criterion)"
        )
    return local_tensor(loss)
