"""Accelerate on sharded models: ``from shardcore_trainer.accelerate import Accelerator``, all else as ever."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.context import context_of
from shardcore.nn import reduce_partial_gradients
from shardcore.nn.optimizers import refuse_stale, what_to_use
from shardcore_trainer._replicas import Replicas, sharded_in
from shardcore_trainer._schedules import SteppedByReplicas
from shardcore_trainer._states import load_states, native_optimizer, save_states
from shardcore_transformers import _private, prepared_by_shardcore


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate is not followed
    """`accelerate.Accelerator` that knows models sharded by shardcore; without one it is the same.

    Prepare the sharded model first, or in the same call as loaders, optimizers and schedulers. Then:

    - the model is not wrapped: it is parallel already.
    - what Accelerate calls processes are the replicas of the model: ``num_processes`` and ``process_index`` count
      them, loaders are divided among them (the ranks of a replica get the same batches), `gather`,
      `gather_for_metrics`, `reduce` and `split_between_processes` go over them, and prepared schedulers make as many
      steps.
    - ``is_main_process`` is true on one rank of all.
    - `clip_grad_norm_` returns the norm of the whole model, a plain tensor.
    - `save_state` and `load_state` go through `shardcore.save_checkpoint`: each rank writes its part, and another mesh
      can read it. `get_state_dict` and `save_model` have full tensors, on the first rank.
    """

    _replicas: Replicas | None = None
    flag_tensor: Tensor | None

    def adopt(self, model: Any) -> None:
        """Take the replicas of the sharded model that ``model`` is or holds, if any, for the processes.

        Raises:
            NotSupportedError: it cannot be trained so, or its replicas are not those of a model adopted before.
            ConfigError: Accelerate is to shard it a second time, by FSDP or DeepSpeed.
        """
        if (sharded := sharded_in(model)) is None:
            return
        _private.require_accelerate()
        replicas = Replicas.of(sharded)
        if self._replicas is not None and self._replicas.context.sizes != replicas.context.sizes:
            raise NotSupportedError(
                f"this Accelerator has a model on the mesh {self._replicas.context.sizes}, and a "
                f"{type(sharded).__name__} on {replicas.context.sizes}: they do not agree what a replica is. Shard "
                "both over the same sizes, or make an Accelerator for each"
            )
        for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config"):
            if getattr(self.state, name, None) is not None:
                raise ConfigError(
                    f"Accelerate has a {name}, and the {type(sharded).__name__} was sharded by shardcore: it cannot be "
                    "sharded twice. Leave FSDP, DeepSpeed and ParallelismConfig out of Accelerate's configuration (and "
                    "out of TrainingArguments), and say tp= and dp= to shardcore.shard"
                )
        replicas.tell()
        self._replicas = replicas

    @property
    @override
    def num_processes(self) -> Any:
        return self.state.num_processes if self._replicas is None else self._replicas.count

    @property
    @override
    def process_index(self) -> Any:
        return self.state.process_index if self._replicas is None else self._replicas.index

    @property
    @override
    def is_last_process(self) -> Any:
        return self.state.is_last_process

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare everything, and take the replicas of a sharded model for the processes; see `adopt`."""
        for found in args:
            self.adopt(found)
        with prepared_by_shardcore():
            return super().prepare(*args, device_placement=device_placement)

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model; one that was sharded is not wrapped."""
        self.adopt(model)
        # Nothing wraps a sharded model. Mixed precision and compilation are done in this mode too.
        if self._replicas is not None and not evaluation_mode:
            self._replicas.share_plain(model)
        with prepared_by_shardcore():
            return super().prepare_model(model, device_placement, evaluation_mode or sharded_in(model) is not None)

    @override
    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader: each replica gets its part, and all ranks of a replica the same batches."""
        if self._replicas is None:
            if not self._models and dist.is_initialized() and dist.get_world_size() > 1:
                raise ConfigError(
                    "a loader was prepared before the model, which says which ranks have the same batches. Prepare "
                    "the model first, or in the same call: model, loader = accelerator.prepare(model, loader)"
                )
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        return _prepared(self, self._replicas, data_loader, device_placement, super().prepare_data_loader)

    @override
    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer; partial gradients that were deferred are summed before its steps."""
        if self._replicas is not None:
            _refuse_unable(native_optimizer(optimizer))
        prepared = super().prepare_optimizer(optimizer, device_placement)
        models = [found for model in self._models if (found := sharded_in(model)) is not None]
        if any(_defers(model) for model in models):
            optimizer.register_step_pre_hook(lambda *_: _reduce(models))
        return prepared

    @override
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler, which makes one step for each replica."""
        prepared = super().prepare_scheduler(scheduler)
        if self._replicas is not None and type(prepared) is AcceleratedScheduler:
            prepared.__class__ = SteppedByReplicas
            prepared.steps = self._replicas.count
        return prepared

    @contextlib.contextmanager
    @override
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave the gradients of a model unsummed over replicas until the next backward outside."""
        sharded = sharded_in(model)
        if sharded is None:
            with super().no_sync(model):
                yield
        elif isinstance(sharded, FSDPModule):
            sharded.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                sharded.set_requires_gradient_sync(True)
        else:
            yield

    @override
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the whole model, and return it, a plain tensor ()."""
        if self._replicas is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        _reduce([model for model in self._models if _defers(model)])
        return clip_grad_norm_(parameters, max_norm, norm_type)

    @override
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each value of the gradients, after deferred ones were summed."""
        _reduce([model for model in self._models if _defers(model)])
        super().clip_grad_value_(parameters, clip_value)

    @override
    def gather(self, tensor: Any) -> Any:
        """Gather tensors from all replicas, each once."""
        return super().gather(tensor) if self._replicas is None else self._replicas.gather(tensor)

    @override
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from all replicas, without the rows by which the last batches were filled up."""
        if self._replicas is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            data = None if use_gather_object else self._replicas.gather(input_data)
        except TypeError:  # something in it is no tensor; nothing was sent
            data = None
        if data is None:
            data = self._replicas.gather_objects(input_data)
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        # The last batches were filled up so that all replicas have equally many.
        return _first_rows(data, remainder) if remainder > 0 else data

    @override
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over the replicas."""
        if self._replicas is None:
            return super().reduce(tensor, reduction, scale)
        return self._replicas.reduce(tensor, reduction, scale)

    @override
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size of all replicas along ``dim``."""
        if self._replicas is None:
            return super().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
        return self._replicas.padded(tensor, dim, pad_index, first=pad_first)

    @override
    def check_trigger(self) -> bool:
        """Tell whether any rank has set the trigger."""
        if self._replicas is None:
            return bool(super().check_trigger())
        # Whichever rank has set it: the ranks of a replica go on together, or end together.
        found = self._replicas.any_rank(int(self.flag_tensor is not None and bool(self.flag_tensor.item())))
        self.flag_tensor = None
        return bool(found)

    @contextlib.contextmanager
    @override
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each replica its part of ``inputs``."""
        state = self.state if self._replicas is None else _Processes(self.num_processes, self.process_index)
        with PartialState.split_between_processes(state, inputs, apply_padding=apply_padding) as part:
            yield part

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return full tensors on the first rank, and an empty dict on the others, of a sharded model."""
        if (sharded := sharded_in(model)) is None or context_of(sharded) is None:
            return super().get_state_dict(model, unwrap)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.unwrap_model(model), options=whole)

    @override
    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Save full tensors, as the unsharded model is saved; every rank calls it."""
        super().save_model(model, *args, **kwargs)
        if sharded_in(model) is not None:
            self.wait_for_everyone()  # nobody reads what is not written yet

    @override
    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save everything by `shardcore.save_checkpoint`, each rank its part, beside Accelerate's own files."""
        if self._replicas is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        return save_states(self, super().save_state, output_dir, safe_serialization, **kwargs)

    @override
    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what `save_state` has saved, on this mesh or another."""
        if self._replicas is None:
            super().load_state(input_dir, load_kwargs, **kwargs)
        else:
            load_states(self, super().load_state, input_dir, load_kwargs, **kwargs)


def adopt(accelerator: Any, model: Any) -> Any:
    """Return ``accelerator``, which somebody else has made, as one that knows the sharded ``model``."""
    if not isinstance(accelerator, Accelerator):
        native = type(accelerator)
        accelerator.__class__ = (
            Accelerator if native is accelerate.Accelerator else type(native.__name__, (Accelerator, native), {})
        )
    accelerator.adopt(model)
    return accelerator


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients of ``parameters`` by the norm of the whole model, and return it.

    `torch.nn.utils.clip_grad_norm_` for parameters of which some are plain, or lie on other meshes than the rest, and
    with a plain tensor as the result.

    Args:
        parameters: one or several; those without a gradient are left out.
        max_norm: the largest norm; infinity clips nothing.
        norm_type: which norm.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in given:
        if (grad := parameter.grad) is not None:
            by_mesh[grad.device_mesh if isinstance(grad, DTensor) else None].append(parameter)
    norms = [get_total_norm([p.grad for p in some if p.grad is not None], norm_type) for some in by_mesh.values()]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(plain), norm_type) if plain else torch.tensor(0.0)
    for some in by_mesh.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total


class _Processes:
    """What `accelerate.PartialState.split_between_processes` wants to know."""

    def __init__(self, count: int, index: int) -> None:
        self.num_processes, self.process_index = count, index


def _refuse_unable(optimizer: Any) -> None:
    """Refuse what would fail in its first step, with torch's words about mixed tensors, or would do nothing.

    Raises:
        NotSupportedError: it is such an optimizer.
        ConfigError: it was made before the model was sharded, and its steps would change nothing.
    """
    refuse_stale(optimizer)
    if words := what_to_use(optimizer):
        raise NotSupportedError(f"{words} (TrainingArguments(optim='adamw_torch'))")


def _defers(model: nn.Module) -> bool:
    sharded = sharded_in(model)
    context = None if sharded is None else context_of(sharded)
    return context is not None and context.defers


def _reduce(models: Iterable[nn.Module]) -> None:
    for model in models:
        if (sharded := sharded_in(model)) is not None:
            reduce_partial_gradients(sharded)


def _first_rows(data: Any, rows: int) -> Any:
    if isinstance(data, dict):
        return type(data)({name: _first_rows(value, rows) for name, value in data.items()})
    if isinstance(data, tuple | list) and any(isinstance(value, Tensor | dict | tuple | list) for value in data):
        return type(data)(_first_rows(value, rows) for value in data)
    return data[:rows]


def _prepared(
    accelerator: Accelerator,
    replicas: Replicas,
    loader: DataLoader[Any],
    device_placement: bool | None,
    native: Callable[..., Any],
) -> Any:
    """Return the loader of a replica; all its ranks get the same batches, in the same order."""
    if getattr(loader, "_is_accelerate_prepared", False):
        return native(loader, device_placement)
    settings = accelerator.dataloader_config
    if settings.dispatch_batches:
        raise NotSupportedError(
            "dispatch_batches=True lets one rank read for all, and does not know which ranks have the same batches. "
            "Leave it out: each rank reads, and keeps the part of its replica"
        )
    kept, settings.dispatch_batches = settings.dispatch_batches, False
    try:
        prepared = native(loader, device_placement)
    finally:
        settings.dispatch_batches = kept
    sampler: Any = None if isinstance(loader.dataset, IterableDataset) else prepared.get_sampler()
    if hasattr(sampler, "initial_seed"):  # the order of a SeedableRandomSampler follows from this and the epoch
        sampler.initial_seed = replicas.first(lambda: sampler.initial_seed, "all")
    begin = prepared.begin  # called where a pass begins, before anything is drawn

    def begin_alike() -> None:
        replicas.agree_on_generators()
        begin()

    prepared.begin = begin_alike
    return prepared
