"""timm's tools that look at whole tensors, for sharded models.

| in place of | write |
|---|---|
| `from timm.utils import CheckpointSaver, NativeScaler, ...` | `from shard_vit.timm_training import ...` |

They do with a model that is not sharded what the native ones do. What is not here needs nothing: timm's own
`resume_checkpoint` and `load_checkpoint` give each rank its part of the whole tensors that the files have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import timm.utils
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shardcore.comm.parts import check_parts, part_of
from shardcore.errors import NotSupportedError
from shardcore.mesh.axes import host_group
from shardcore.mesh.context import context_of, division_of, unwrapped
from shardcore_transformers.writing import Transport, WriterBarrier

#: What a saver remembers of the files that it has written.
_HISTORY = ("checkpoint_files", "best_epoch", "best_metric", "curr_recovery_file", "prev_recovery_file")


class CheckpointSaver(timm.utils.CheckpointSaver):  # type: ignore[misc]  # timm is not followed
    """timm's `CheckpointSaver`, of a sharded model: one rank writes the files that the unsharded training would write.

    Every rank makes one, with the same arguments, and makes every call. The first rank of the model brings all tensors
    together, of the model, of its average and of the optimizer, so that it needs room for them on its host; where there
    is none, use `shardcore.save_checkpoint`. The ``metric`` of that rank decides which files are kept, and all ranks
    return what it returns. Its arguments are those of the native class.
    """

    optimizer: Any
    unwrap_fn: Any

    @override
    def save_checkpoint(self, epoch: int, metric: Any = None) -> Any:
        """Save the current state as ``last`` and, if it earns a place, as a numbered file; every rank calls it.

        Returns:
            the best metric and its epoch.

        Raises:
            MissingRanksError: some ranks did not call it.
            AgreementError: another rank failed, of which the words are given.
            NotSupportedError: the model is divided among the ranks of a pipeline.
        """
        return self._by_one_rank(super().save_checkpoint, (epoch, metric), self._models())

    @override
    def save_recovery(self, epoch: int, batch_idx: int = 0) -> Any:
        """Save the current state between two epochs; every rank calls it. Errors are those of `save_checkpoint`."""
        return self._by_one_rank(super().save_recovery, (epoch, batch_idx), self._models())

    def save_milestone(self, completed_epochs: int) -> Any:
        """Keep the last file under another name; every rank calls it. Errors are those of `save_checkpoint`."""
        return self._by_one_rank(super().save_milestone, (completed_epochs,), None)

    def _models(self) -> list[Any]:
        """Return what the native methods ask for its state, by `unwrap_fn`."""
        if (task := getattr(self, "task", None)) is None:  # timm 1.0.23 has none
            return [model for model in (self.model, self.model_ema) if model is not None]
        found: list[Any] = []

        def noted(model: Any) -> Any:
            found.append(model)
            return self.unwrap_fn(model)

        for ema in (False, True):
            task.get_checkpoint_state(ema=ema, unwrap_fn=noted)
        return found

    def _by_one_rank(self, native: Callable[..., Any], args: tuple[Any, ...], models: list[Any] | None) -> Any:
        """Call ``native`` on the first rank, with the whole states of ``models`` and of the optimizer."""
        if (context := context_of(unwrapped(self.model))) is None:
            return native(*args)
        if division_of(unwrapped(self.model)) is not None:
            raise NotSupportedError(
                "CheckpointSaver writes whole models, and no rank has all of one that is divided among the ranks of a "
                "pipeline. Use shardcore.save_checkpoint"
            )
        ranks = tuple(int(rank) for rank in context.mesh.mesh.flatten())
        states = [] if models is None else [self.unwrap_fn(model).state_dict() for model in models]
        own = [*states, {} if models is None else self.optimizer.state_dict()]
        parts = dict(_parts(own))
        check_parts(parts)
        meeting = WriterBarrier.wait(ranks, {}, f"CheckpointSaver.{native.__name__}")
        transport = Transport(parts, ranks[0])
        answer: list[Any] = [None, None]
        if dist.get_rank() == ranks[0]:
            with meeting.telling():
                *whole, optimizer = _filled(own, transport.gather(parts, meeting.proceed))
                with self._lent(dict(zip(map(id, models or ()), whole, strict=True)), optimizer):
                    answer = [native(*args), {name: vars(self)[name] for name in _HISTORY}]
            meeting.proceed()
        else:
            meeting.follow(ranks[0])
            transport.send(parts)
            meeting.follow(ranks[0])
        if len(ranks) > 1:
            dist.broadcast_object_list(answer, src=ranks[0], group=host_group(ranks))
        for name, value in answer[1].items():
            setattr(self, name, value)
        return answer[0]

    @contextmanager
    def _lent(self, models: Mapping[int, Any], optimizer: Any) -> Iterator[None]:
        """Answer the native methods with these states of ``models``, by identity, and of the ``optimizer``."""
        own = self.optimizer, self.unwrap_fn
        self.optimizer, self.unwrap_fn = _State(optimizer), lambda model: _State(models[id(model)])
        try:
            yield
        finally:
            self.optimizer, self.unwrap_fn = own


class NativeScaler(timm.utils.NativeScaler):  # type: ignore[misc]  # timm is not followed
    """timm's `NativeScaler`, which clips gradients of sharded models adaptively too."""

    @override
    def __call__(
        self,
        loss: Tensor,
        optimizer: Any,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Any = None,
        **settings: Any,
    ) -> None:
        """Scale the loss, run the backward and, if this batch is the last of a step, clip and make the step."""
        if clip_mode == "agc" and parameters is not None:
            parameters = _each_whole(parameters)
        super().__call__(loss, optimizer, clip_grad, clip_mode, parameters, **settings)


def dispatch_clip_grad(parameters: Any, value: float, mode: str = "norm", norm_type: float = 2.0) -> None:
    """Clip gradients as timm's `dispatch_clip_grad`; every rank calls it.

    Args:
        parameters: of the model; one, or several.
        value: the largest norm, the largest value, or the factor of adaptive clipping.
        mode: ``"norm"``, ``"value"`` or ``"agc"``.
        norm_type: which norm.
    """
    given = _each_whole(parameters) if mode == "agc" else parameters
    timm.utils.dispatch_clip_grad(given, value, mode=mode, norm_type=norm_type)


def adaptive_clip_grad(parameters: Any, clip_factor: float = 0.01, eps: float = 1e-3, norm_type: float = 2.0) -> None:
    """Clip by the norms of whole rows, as timm's `adaptive_clip_grad` (https://arxiv.org/abs/2102.06171).

    Every rank calls it, and holds one whole parameter with its gradient at a time. Settings are those of the native
    function.
    """
    timm.utils.adaptive_clip_grad(_each_whole(parameters), clip_factor, eps, norm_type)


class _State:
    """Has a state dict."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        """Return it."""
        return self._state


def _each_whole(parameters: Any) -> Iterator[Tensor]:
    """Yield a whole plain parameter with its gradient in the place of each sharded one, and take the gradient back.

    Only for who is done with one before the next is asked for.
    """
    each: Iterable[Tensor] = [parameters] if isinstance(parameters, Tensor) else parameters
    for parameter in each:
        if parameter.grad is None or not isinstance(parameter, DTensor):
            yield parameter
            continue
        values, gradient = parameter.detach(), parameter.grad
        assert isinstance(values, DTensor)
        whole = nn.Parameter(values.full_tensor())
        whole.grad = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        yield whole
        parameter.grad = part_of(whole.grad, parameter).clone()


def _parts(state: Any, at: str = "") -> Iterator[tuple[str, DTensor]]:
    """Yield the DTensors in nested ``state`` by their place."""
    if isinstance(state, DTensor):
        yield at, state
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _parts(value, f"{at}/{key}")


def _filled(state: Any, whole: Mapping[str, Tensor], at: str = "") -> Any:
    """Return nested ``state`` with the ``whole`` tensors in the place of its DTensors."""
    if isinstance(state, DTensor):
        return whole[at]
    if isinstance(state, dict):
        filled = copy.copy(state)  # with what torch hangs on a state dict
        filled.update({key: _filled(value, whole, f"{at}/{key}") for key, value in state.items()})
        return filled
    if isinstance(state, list | tuple):
        return type(state)(_filled(value, whole, f"{at}/{number}") for number, value in enumerate(state))
    return state
