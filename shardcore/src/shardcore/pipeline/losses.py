"""Losses of micro-batches, put together: how each is reduced is seen in what torch's loss functions are given.

The loss of a batch is put together from those of its micro-batches. How is decided by the function that computes it: a
mean over labels, of which micro-batches have other numbers; over labels but the first, where each token predicts the
next one; over rows; or a sum, as with ``num_items_in_batch``. Nothing else can be put together exactly, and that is an
error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError
from shardcore.pipeline.microbatches import IGNORED, rows_of

#: Returns the loss of a model's output and the arguments of its call.
Loss: TypeAlias = Callable[[Any, Mapping[str, Any]], Tensor]

#: Returns over how many items the loss of a micro-batch is a mean.
Weight: TypeAlias = Callable[[Mapping[str, Any]], float]

#: Functions of torch that reduce to one number, as ``reduction`` says.
_LOSSES = frozenset(
    function
    for function in vars(F).values()
    if inspect.isfunction(function) and "reduction" in inspect.signature(function).parameters
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How a loss reduces to one number."""

    kind: str  # to a mean over ``labels``, a mean over ``rows``, a ``sum``, or ``unknown``
    argument: str = ""  # of the call, which has the labels that it is computed from
    #: The first label of each row does not count; None where nobody can tell, since none counts.
    shifted: bool | None = False
    ignored: int = IGNORED  # the label that does not count
    #: Arguments that left nothing out where it was seen: a mean over what they leave looks like one over all.
    masks: tuple[str, ...] = ()

    def count(self, arguments: Mapping[str, Any]) -> float:
        """Return how many of them the arguments of a call have."""
        if self.kind != "labels":
            return float(rows_of(arguments))
        labels = arguments[self.argument]
        return float((labels[..., 1:] if self.shifted else labels).ne(self.ignored).sum())

    def shares(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the share of each of ``parts`` in the mean over all of them."""
        counts = [self.count(part) for part in parts]
        total = sum(counts) or 1.0
        return [count / total for count in counts]

    def ignores(self, arguments: Mapping[str, Any]) -> bool:
        """Tell whether it is computed from labels of which none counts in the arguments of a call."""
        return bool(self.argument) and bool((arguments[self.argument] == self.ignored).all())

    def with_masks(self, parts: Sequence[Mapping[str, Any]]) -> Reduction:
        """Return what is known of it where masks leave something out in one of the micro-batches ``parts``."""
        whole = all(_leaves_all(part.get(name)) for part in parts for name in self.masks)
        return self if whole else replace(self, kind="unknown")

    def __str__(self) -> str:
        return f"the {self.argument} that count" if self.kind == "labels" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """A call of a loss function of torch."""

    over: Reduction  # what its mean is one over, whether it reduces to that or not
    reduction: str  # what torch's argument of that name says that it reduces to
    numbers: int  # how many it has made a loss of
    made: Tensor  # what it returned

    def reduced(self, loss: Tensor, arguments: Mapping[str, Any]) -> Reduction:
        """Return what the loss is made of, if it is made of this call alone."""
        if self.reduction not in ("sum", "none") or self.over.shifted is None:
            return self.over
        if self.over.kind == "labels" and not self.over.count(arguments):
            return replace(self.over, kind="unknown", shifted=None)  # a sum over none is 0 whatever divides it
        by = self._divisor(loss)
        whole = arguments.get("num_items_in_batch")
        if _near(by, 1.0) or (whole is not None and _near(by, float(whole))):
            return replace(self.over, kind="sum")
        if self.over.kind == "labels" and _near(by, self.over.count(arguments)):
            return self.over
        if _near(by, rows_of(arguments)):
            return replace(self.over, kind="rows")
        masks = tuple(name for name, value in arguments.items() if _leaves_all(value))
        return replace(self.over, kind="rows" if _near(by, self.numbers) else "unknown", masks=masks)

    def _divisor(self, loss: Tensor) -> float:
        """Return by what the sum of all that it made was divided for the loss; NaN if some of it counts for less.

        A mean over some of it may come as near to the mean over all as one likes. Its gradient does not.
        """
        made, value = local_tensor(self.made), float(local_tensor(loss.detach()))
        by = float(made.detach().sum(dtype=torch.float64)) / value if value else math.nan
        if self.made.requires_grad and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, self.made, retain_graph=True, allow_unused=True)
            weights = made.new_zeros(1) if gradient is None else local_tensor(gradient)[made != 0]
            least, most = (float(end) for end in weights.aminmax()) if weights.numel() else (0.0, 0.0)
            if not _near(least, most) or not most:
                return math.nan
        return by


class LossCalls(TorchFunctionMode):
    """Writes down the calls of the loss functions of torch while it is entered, but of those that compute on meta.

    Labels are looked for among the ``arguments`` of the model. Of a call that is ``traced`` nothing goes on: from a
    loss function on gradients are recorded, until the end of what has turned them off. They tell how a loss is made of
    what that returned, where values may come near those of another reduction.
    """

    def __init__(self, arguments: Mapping[str, Any], *, traced: bool = False) -> None:
        super().__init__()
        self._arguments, self._traced = arguments, traced
        self.calls: list[LossCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and write it down if it is one of them."""
        out = func(*args, **(kwargs or {}))
        if func in _LOSSES and isinstance(out, Tensor) and not out.is_meta:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            target = given.get("target", given.get("targets"))
            over = _over(func, target, given, self._arguments)
            numbers = target.numel() if isinstance(target, Tensor) else 0
            if self._traced and not torch.is_inference_mode_enabled():
                torch.set_grad_enabled(True)
                out = out.detach().requires_grad_()
            self.calls.append(LossCall(over=over, reduction=given["reduction"], numbers=numbers, made=out))
            return out.clone()  # what is computed of it may be computed in its place
        return out


def _over(function: Any, target: Any, given: Mapping[str, Any], arguments: Mapping[str, Any]) -> Reduction:
    """Return what a mean of a loss function is one over."""
    if given.get("weight") is not None or not isinstance(target, Tensor):
        return Reduction(kind="unknown")
    if function is F.ctc_loss:
        return Reduction(kind="rows")
    if target.is_floating_point():
        return _over_numbers(target, arguments)
    ignored = given.get("ignore_index")
    ignored = IGNORED if ignored is None else ignored
    integers = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and not v.is_floating_point() and v.ndim}
    integers = {name: value.to(target.device) for name, value in integers.items()}
    # What is equal as it is comes before what is when it is shifted, perhaps by accident: short masks are.
    for name in sorted(integers, key=lambda name: ("label" not in name, not _equal(target, integers[name]))):
        labels = integers[name]
        same = _equal(target, labels)
        if labels.ndim > 1 and (
            _equal(target, labels[..., 1:]) or _equal(target, F.pad(labels, (0, 1), value=ignored)[..., 1:])
        ):
            return Reduction(kind="labels", argument=name, shifted=None if same else True, ignored=ignored)
        if same:
            return Reduction(kind="labels", argument=name, ignored=ignored)
    if target.numel() == rows_of(arguments) and not bool((target == ignored).any()):
        return Reduction(kind="rows")
    return Reduction(kind="unknown")


def _over_numbers(target: Tensor, arguments: Mapping[str, Any]) -> Reduction:
    """Return what a mean over numbers is one over: as many in each row, or those labels that a mask selects."""
    count, tensors = target.numel(), {n: v.to(target.device) for n, v in arguments.items() if isinstance(v, Tensor)}
    masks = {name: value for name, value in tensors.items() if value.numel() > 1 and _is_mask(value)}
    some = [name for name, mask in masks.items() if int(mask.sum()) == count < mask.numel()]
    if not any(_equal(target, value) for value in tensors.values()):
        for name in some:  # as many by accident, where it selects other labels
            alike = (value for value in tensors.values() if value.shape == masks[name].shape)
            if any(_equal(target, value[masks[name] == 1]) for value in alike):
                return Reduction(kind="labels", argument=name, ignored=0)
        if some or count % rows_of(arguments):
            return Reduction(kind="unknown")
    whole = tuple(name for name, mask in masks.items() if mask.numel() == count and _leaves_all(mask))
    return Reduction(kind="rows", masks=whole)


def _is_mask(value: Tensor) -> bool:
    return not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())


def _equal(target: Tensor, labels: Tensor) -> bool:
    return target.numel() == labels.numel() and bool((target.flatten() == labels.flatten()).all())


def _near(number: float, wanted: float) -> bool:
    return math.isclose(number, wanted, rel_tol=1e-3)


def reductions_of(
    out: Any, loss: Tensor, inside: Sequence[LossCall], outside: Sequence[LossCall], arguments: Mapping[str, Any]
) -> tuple[Reduction, ...]:
    """Return what a loss is made of; nothing if no function of torch has made it.

    A function has made it of ``out``, the output of the model, or has taken it from there. The calls ``inside`` are the
    model's, those ``outside`` are that function's.
    """
    taken = any(leaf is loss or _is_of(leaf, loss) for leaf in tree_flatten(out)[0])
    calls = outside or (inside if taken else ())
    if len(calls) == 1:
        return (calls[0].reduced(loss, arguments),)
    unknown = Reduction(kind="unknown")
    return tuple(dict.fromkeys(unknown if call.reduction in ("sum", "none") else call.over for call in calls))


def _is_of(leaf: Any, loss: Tensor) -> bool:
    """Tell whether a loss is a tensor of the output, perhaps detached from its gradient."""
    if not isinstance(leaf, Tensor) or leaf.shape != loss.shape:
        return False
    return local_tensor(leaf).data_ptr() == local_tensor(loss).data_ptr()


def _leaves_all(value: Any) -> bool:
    """Tell whether an argument is a mask that leaves nothing out."""
    return (
        isinstance(value, Tensor) and not value.is_floating_point() and value.numel() > 0 and bool((value == 1).all())
    )


def shares_of(reductions: Sequence[Reduction], parts: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    """Return the part that the loss of each micro-batch has in that of the batch: none where no label counts.

    Without ``reductions`` nobody knows what it is made of: a mean over rows, or over labels that do not differ from it.

    Raises:
        ConfigError: it cannot be put together; names the model, which is ``what``.
    """
    ignored = [any(reduction.ignores(part) for reduction in reductions) for part in parts]
    if len(parts) == 1 or (reductions and all(reduction.kind == "sum" for reduction in reductions)):
        return [0.0 if nothing else 1.0 for nothing in ignored]
    known = [reduction.with_masks(parts) for reduction in reductions] or _documented(parts)
    shares = [reduction.shares(parts) for reduction in known if reduction.kind in ("labels", "rows")]
    same = all(abs(a - b) <= 1e-12 for other in shares[1:] for a, b in zip(shares[0], other, strict=True))
    if len(shares) < len(known) or not same:
        made = ", ".join("a sum" if reduction.kind == "sum" else f"a mean over {reduction}" for reduction in known)
        raise ConfigError(
            f"the loss of {what} cannot be put together from those of {len(parts)} micro-batches: means over one "
            f"kind of items can, and sums, and it is made of {made}; run the batch as one (num_microbatches=1), or say "
            "how much each micro-batch weighs (train_step(batch, weight=...))"
        )
    return [0.0 if nothing else share for nothing, share in zip(ignored, shares[0], strict=True)]


def _documented(parts: Sequence[Mapping[str, Any]]) -> list[Reduction]:
    """Return what a loss of no function of torch may be: a mean over rows, which is one over labels too."""
    labels = parts[0].get("labels")
    counts = isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()
    return [Reduction(kind="rows"), *([Reduction(kind="labels", argument="labels")] if counts else [])]


def named(loss: Loss | None) -> str:
    """Name a function by its code and what it holds: it may be made anew in each step, and may hold something else."""
    function: Any = loss
    if (code := getattr(function, "__code__", None)) is None:
        return repr(function)
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    plain = (str, int, float, bool, type(None))
    return f"{code} {[value if isinstance(value, plain) else (type(value), id(value)) for value in held]}"


def own_loss(out: Any, arguments: Mapping[str, Any]) -> Tensor:
    """Return the loss that a model has computed itself; refuse an output that has none."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ConfigError(
            f"a {type(out).__name__} has no loss; pass labels, or give loss=, a function of the output and the batch "
            "(of a Booster, its criterion)"
        )
    return local_tensor(loss)


def wide(loss: Tensor) -> Tensor:
    """Return a loss in float32 at least: neither a scale nor a sum over micro-batches fits into less."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
