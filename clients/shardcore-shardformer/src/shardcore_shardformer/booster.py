"""`Booster`: one script for every mesh."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shardcore.agree.agreement import agreement
from shardcore.api import shard
from shardcore.checkpoint import load_checkpoint, save_checkpoint
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import device_type_here
from shardcore.mesh.context import context_of
from shardcore.pipeline import micro_batches
from shardcore.pipeline.engine import pipeline_of
from shardcore.pipeline.losses import LossCalls, own_loss, reductions_of, shares_of, wide
from shardcore.pipeline.microbatches import IGNORED, rows_of, with_labels
from shardcore_shardformer.outputs import joined
from shardcore_shardformer.plugin import HybridParallelPlugin
from shardcore_shardformer.stepping import Stepping

#: Returns the loss of a model's output and the arguments of its call.
Criterion = Callable[[Any, Any], Tensor]

_BOOSTED = "_shardcore_boosted"  # on the model, and on its optimizer


class Boosted(NamedTuple):
    """What `Booster.boost` returns, in this order: the same objects that it was given."""

    model: Any
    optimizer: Any
    criterion: Any
    dataloader: Any
    lr_scheduler: Any


class Booster:
    """Trains a model as its plugin says; the same script runs on every mesh.

    ```python
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, max_norm=1.0))
    model, optimizer, criterion, loader, scheduler = booster.boost(model, optimizer, criterion, loader, scheduler)
    batches = iter(loader)
    for _ in range(len(loader)):
        loss = booster.execute_pipeline(batches, model, criterion, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
    ```

    After ColossalAI's ``Booster``.

    Args:
        plugin: how the model is trained; by default on all ranks as replicas.
    """

    def __init__(self, plugin: HybridParallelPlugin | None = None) -> None:
        if not isinstance(plugin, HybridParallelPlugin | None):
            raise ConfigError(f"Booster(plugin=) wants a HybridParallelPlugin, got {plugin!r}")
        self.plugin = plugin or HybridParallelPlugin()

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Shard ``model``, and let ``optimizer`` step its parameters with one scale and one norm over all ranks.

        Everything stays the object that it is: the optimizer keeps its groups and options, and the scheduler its
        optimizer.

        Args:
            model: the unsharded model, the same on every rank.
            optimizer: of its parameters, not stepped yet.
            criterion: returns the loss of an output and a batch; returned as it is.
            dataloader: gives each replica its own batches, the same on all ranks of one replica.
            lr_scheduler: of the optimizer; returned as it is.

        Raises:
            ConfigError: the loader would give all replicas the same batches.
            ShardcoreError: what `shardcore.shard` raises.
        """
        plugin = self.plugin
        self._check_loader(dataloader)
        model = shard(
            model, plugin.config(), policy=plugin.custom_policy, optimizer=optimizer, wrap=plugin.wrap() or True
        )
        stepping = Stepping(self.plugin, model)
        model.__dict__[_BOOSTED] = stepping
        if optimizer is not None:
            optimizer.__dict__[_BOOSTED] = (stepping, model)
            stepping.watch(optimizer)
        return Boosted(model, optimizer, criterion, dataloader, lr_scheduler)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Run the backward of a loss, scaled as the precision needs.

        Raises:
            NotSupportedError: the model is divided among the ranks of a pipeline.
        """
        stepping, model = _of(optimizer)
        if self.plugin.pp_size > 1:
            raise NotSupportedError(
                f"Booster.backward of a {type(model).__name__} in a pipeline: execute_pipeline runs the backward too"
            )
        (loss.float() * stepping.scale if stepping.scale != 1.0 else loss).backward()

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool | Literal["everywhere"] = False,
    ) -> dict[str, Any]:
        """Take the next batch, and run forward and backward of it in micro-batches; without a pipeline too.

        Under ``torch.no_grad()`` it runs the forward alone.

        Args:
            data_iter: gives batches: the arguments of a call of the model, by name.
            model: what `boost` returned.
            criterion: returns the loss of the output of a micro-batch and the micro-batch; the model's own without it.
            optimizer: what `boost` returned; with it the loss of the backward is scaled as its precision needs.
            return_loss: return the loss of the batch, on every rank.
            return_outputs: return the outputs, in the order of the rows; in a pipeline on the ranks of the last stage,
                None on all others. ``"everywhere"`` sends them to all.

        Returns:
            ``{"loss": Tensor or None, "outputs": ... or None}``

        Raises:
            StopIteration: there is no further batch.
            ShardcoreError: what `shardcore.pipeline.PipelinedModel.train_step` raises.
        """
        stepping: Stepping | None = model.__dict__.get(_BOOSTED)
        trains = torch.is_grad_enabled()
        scale = stepping.scale if trains and optimizer is not None and stepping is not None else 1.0
        taken: list[dict[str, Any]] = []

        def take() -> dict[str, Any]:
            taken.append(_arguments(next(data_iter), model))
            return taken[0]

        outputs: list[Any] | None = [] if return_outputs else None
        if self.plugin.pp_size > 1:
            pipeline = pipeline_of(model)
            assert pipeline is not None  # the plugin has stages
            # What fails while data is taken is to fail on all ranks.
            everywhere = return_outputs == "everywhere"
            loss = pipeline.step(
                take, training=trains, loss=criterion, scale=scale, outputs=outputs, everywhere=everywhere
            )
        else:
            loss = self._whole(model, take(), criterion, scale, outputs)
        found = None
        if outputs:
            found = joined(outputs, [rows_of(part) for part in micro_batches(taken[0], **self.plugin.division)])
        return {"loss": loss / scale if return_loss else None, "outputs": found}

    def _whole(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any],
        criterion: Criterion | None,
        scale: float,
        outputs: list[Any] | None,
    ) -> Tensor:
        """Run forward and backward of all micro-batches of a model that no pipeline divides; return their loss."""
        parts = micro_batches(arguments, **self.plugin.division)
        shares = [1.0] if len(parts) == 1 and not _lacks_labels(parts[0]) else []
        losses = []
        for number, part in enumerate(parts):
            # Below ZeRO's second stage replicas sum gradients once for each batch.
            waits = self.plugin.zero_stage < 2 and number + 1 < len(parts)
            with self.no_sync(model) if waits else contextlib.nullcontext():
                # Every micro-batch runs, since replicas sum gradients in its backward.
                call = with_labels(part) if (not shares[number] if shares else _lacks_labels(part)) else part
                inside, outside = LossCalls(call), LossCalls(call)
                with contextlib.nullcontext() if shares else inside:
                    out = model(**call)
                with contextlib.nullcontext() if shares else outside:
                    loss = (criterion or own_loss)(out, call)
                if not shares:  # seen in the first of them
                    reductions = reductions_of(out, loss, inside.calls, outside.calls, call)
                    shares = shares_of(reductions, parts, type(model).__name__)
                    if not reductions and call is not part:  # nobody knows whether it is computed from labels
                        shares[number] = 0.0
                loss = wide(loss) * (shares[number] * scale)
                if torch.is_grad_enabled():
                    loss.backward()
            losses.append(loss.detach() if shares[number] else torch.zeros_like(loss))  # a mean over nothing is NaN
            if outputs is not None:
                outputs.append(tree_map_only(Tensor, Tensor.detach, out))
        return torch.stack(losses).sum()

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Leave gradients of replicas alone until the first backward outside, which sums all.

        Raises:
            NotSupportedError: in a pipeline, which sums gradients once for each call of `execute_pipeline`.
        """
        if self.plugin.pp_size > 1:
            raise NotSupportedError(
                "Booster.no_sync in a pipeline: gradients are summed once for each execute_pipeline; to accumulate, "
                "call it several times before optimizer.step(), or give it larger batches of more micro-batches"
            )
        stepping: Stepping | None = model.__dict__.get(_BOOSTED)
        if stepping is None or not isinstance(model, FSDPModule):
            yield
            return
        outside, stepping.accumulates = stepping.accumulates, True
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            stepping.accumulates = outside
            model.set_requires_gradient_sync(not outside)

    def save_model(self, model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
        """Write the model into the folder ``checkpoint``, from which every mesh loads it; see `save_checkpoint`."""
        save_checkpoint(checkpoint, model, keep_last=1)

    def load_model(self, model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
        """Load what `save_model` wrote."""
        load_checkpoint(checkpoint, model)

    def save_optimizer(self, optimizer: Optimizer, checkpoint: str | os.PathLike[str]) -> None:
        """Write the optimizer into the folder ``checkpoint``, with its model and the scale of losses."""
        stepping, model = _of(optimizer)
        save_checkpoint(checkpoint, model, optimizer, extra=stepping.state_dict(), keep_last=1)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | os.PathLike[str]) -> None:
        """Load what `save_optimizer` wrote, its model's parameters too."""
        stepping, model = _of(optimizer)
        stepping.load_state_dict(load_checkpoint(checkpoint, model, optimizer).extra)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Write the state of a scheduler into the file ``checkpoint``, by the first rank."""
        _together(lambda: torch.save(lr_scheduler.state_dict(), checkpoint) if _is_first() else None)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """Load what `save_lr_scheduler` wrote."""
        state = _together(lambda: torch.load(checkpoint, weights_only=True))
        lr_scheduler.load_state_dict(state)

    def _check_loader(self, dataloader: Any) -> None:
        replicas = self.plugin.replicas
        # One that divides the data has a sampler of its own; torch's give every replica all of it.
        if (
            replicas > 1
            and type(getattr(dataloader, "sampler", None)) in (SequentialSampler, RandomSampler)
            and (type(dataloader.batch_sampler) is BatchSampler)
        ):
            raise ConfigError(
                f"this DataLoader would give all {replicas} replicas the same batches; make it by "
                "ShardFormer(shard_config=plugin.config()).shard_dataset(dataset, batch_size=...), or with a "
                "torch.utils.data.DistributedSampler over the replicas"
            )


def _arguments(batch: Any, model: nn.Module) -> dict[str, Any]:
    """Return a batch on the device of the model."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"execute_pipeline wants batches that are the arguments of a call by name, got a {type(batch).__name__}; "
            "let the loader's collate_fn return a dictionary"
        )
    context = context_of(model)
    device = torch.device(device_type_here()) if context is None else context.device
    moved: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.to(device), dict(batch))
    return moved


def _lacks_labels(arguments: Mapping[str, Any]) -> bool:
    """Tell whether there are labels of which none counts."""
    labels = arguments.get("labels")
    return isinstance(labels, Tensor) and not labels.is_floating_point() and not bool(labels.ne(IGNORED).any())


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _together(work: Callable[[], Any]) -> Any:
    """Do ``work`` on every rank, and return what it returned here; if it fails on one, raise on all."""
    with agreement():
        return work()


def _of(optimizer: Any) -> tuple[Stepping, nn.Module]:
    found: tuple[Stepping, nn.Module] | None = getattr(optimizer, _BOOSTED, None)
    if found is None:
        raise ConfigError(
            f"this {type(optimizer).__name__} was not boosted; give it to Booster.boost(model, optimizer) first"
        )
    return found
