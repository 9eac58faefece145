"""What every transformers model needs besides its rows: generation on the model's own random stream, and saving."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from typing_extensions import override

from shardcore.clients import client_of
from shardcore.errors import NotSupportedError, WrapError
from shardcore.fsdp.units import unit_of
from shardcore.mesh.context import nearest_context
from shardcore.nn import ParallelMixin, ParallelModule
from shardcore.nn.mixin import once
from shardcore.nn.same_inputs import SameInputs
from shardcore.plan.steps.base import Step
from shardcore.plugins.unserved import installing
from shardcore.policy import ModulePolicy, Policy, Stages
from shardcore.styles import head, replicate
from shardcore_transformers import _private, _saving
from shardcore_transformers._asked import asked_by
from shardcore_transformers._attention import choose_flash_attention
from shardcore_transformers._checkpointing import recompute_layer
from shardcore_transformers._stopping import with_agreed_criteria

_PREPARING = ("transformers.trainer", "accelerate.")  # modules that ask before they prepare a model

_knows = ContextVar("knows sharded models", default=False)


@contextlib.contextmanager
def prepared_by_shardcore() -> Iterator[None]:
    """Let a Trainer or Accelerator that knows sharded models ask them what the others may not ask."""
    token = _knows.set(True)
    try:
        yield
    finally:
        _knows.reset(token)


class _ShardedPretrained:
    """Methods of `transformers.PreTrainedModel` that a sharded model does in its own way."""

    # These two are what the Trainer and Accelerate ask a model for before they do anything.

    @property
    def tp_size(self) -> None:
        """None: transformers has not split the model.

        Raises:
            WrapError: a Trainer asks that does not know sharded models; on every rank, before anything is sent.
        """
        if asked_by(*_PREPARING):
            self._require_knowledge()

    @property
    def _is_accelerate_prepared(self) -> bool:
        if asked_by(*_PREPARING):
            self._require_knowledge()
        return bool(self.__dict__.get("_shardcore_prepared", False))

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._require_knowledge()  # some releases do not ask, and only set it
        self.__dict__["_shardcore_prepared"] = value

    def _require_knowledge(self) -> None:
        if not _knows.get() and nearest_context(self) is not None:  # type: ignore[arg-type]  # mixed into nn.Module subclasses only
            raise WrapError(
                f"this {type(self).__name__} was sharded by shardcore, which transformers' own Trainer and "
                "Accelerate's own Accelerator do not know: each rank would get other batches. Change one line: from "
                "shardcore_trainer import Trainer (or Seq2SeqTrainer); for any other class of trainers "
                "sharded(SFTTrainer) from the same module; for Accelerate: from shardcore_trainer.accelerate "
                "import Accelerator"
            )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the new rows would belong to other ranks."""
        raise NotSupportedError(
            f"resize_token_embeddings on a sharded {type(self).__name__}: its rows live on several ranks. Resize it "
            "before shard(), or save it with save_pretrained, reload, resize and shard again."
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, for ``generate_batch`` too: its cache is made for all heads, and its thread would answer nothing."""
        raise NotSupportedError(
            f"continuous batching (generate_batch) of a sharded {type(self).__name__}: transformers makes its cache "
            "for the heads of the whole model, in a thread of its own on each rank. Use model.generate(...) with "
            "padded prompts, or a server such as vLLM for the saved model"
        )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save the model, or this part of one, as an unsharded checkpoint; every rank calls it and one writes.

        Takes what `transformers.PreTrainedModel.save_pretrained` of the installed release takes. The first rank writes,
        or the first of those that pass ``is_main_process=True``. Tensors come to it one by one: it needs room for one
        file (``max_shard_size``), the other ranks for a part of a tensor. See `_saving.save_pretrained` for errors.
        """
        native = super().save_pretrained  # type: ignore[misc]  # of the native class
        context = nearest_context(self)  # type: ignore[arg-type]  # mixed into nn.Module subclasses only
        if context is None:
            native(save_directory, is_main_process, state_dict, *args, **kwargs)
        else:
            _saving.save_pretrained(self, context, native, save_directory, is_main_process, state_dict, *args, **kwargs)  # type: ignore[arg-type]

    @property
    def peft_config(self) -> Any:
        """The settings of the adapters, as PEFT sets and reads them.

        Raises:
            WrapError: PEFT's own call has put adapters into the sharded model; the error names the one that works.
        """
        try:
            return self.__dict__["peft_config"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'peft_config'") from None

    @peft_config.setter
    def peft_config(self, value: Any) -> None:
        if nearest_context(self) is not None:  # type: ignore[arg-type]  # as above
            _adapters().refuse_unplaced(self)
        self.__dict__["peft_config"] = value

    @peft_config.deleter
    def peft_config(self) -> None:
        self.__dict__.pop("peft_config", None)

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add an adapter of PEFT, as transformers does, in the form that its place in the sharded model needs.

        Every rank calls it. Errors are those of `shardcore_peft.get_peft_model`.
        """
        native = super().add_adapter  # type: ignore[misc]  # of the native class
        if importlib.util.find_spec("peft") is None:
            native(adapter_config, adapter_name)  # which says that it is missing
            return
        _adapters().adding(
            self, adapter_config, adapter_name or "default", lambda: native(adapter_config, adapter_name)
        )

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter of PEFT, as transformers does: every rank reads it, and keeps its part."""
        if nearest_context(self) is None:  # type: ignore[arg-type]  # as above
            return super().load_adapter(*args, **kwargs)  # type: ignore[misc]  # of the native class
        return _adapters().load_into(self, *args, **kwargs)


def _adapters() -> Any:
    """Return the client for adapters.

    Raises:
        NotSupportedError: it is not installed.
    """
    client = client_of("peft")
    if client is None:
        name = "shardcore-peft"
        raise NotSupportedError(
            f"adapters on a sharded model are of {name}, which is not installed{installing(f'clients/{name}')}"
        )
    return client


def _generating(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``native`` (a ``generate``) on the model's random stream: samples agree however the ranks are seeded."""

    @functools.wraps(native)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = nearest_context(self)
        if context is None:
            return native(self, *args, **kwargs)
        if isinstance(self, SameInputs):
            self.compare_generation(args, kwargs)
        unit = unit_of(self)
        context.random.enter(lambda: True)  # sampling
        try:
            # What FSDP2 has gathered is kept from call to call.
            with contextlib.nullcontext() if unit is None else unit.hold():
                return native(self, *args, **kwargs)
        finally:
            context.random.leave()

    return generate


@once
def _sharded_class(native: type[PreTrainedModel]) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        # Configurations, _no_split_modules and output capturing go by the class's name.
        "__module__": native.__module__,
        "__qualname__": native.__qualname__,
        "__doc__": native.__doc__,
        "__copy__": ParallelMixin.__copy__,
        "__deepcopy__": ParallelMixin.__deepcopy__,
        "__reduce_ex__": ParallelMixin.__reduce_ex__,
    }
    # FSDP2 names the class anew, and the Trainer shifts labels by this name.
    namespace["_get_name"] = lambda self: native.__name__
    if hasattr(native, "generate"):
        namespace["generate"] = _generating(native.generate)
    if hasattr(native, "_get_stopping_criteria"):  # some classes, and remote code, have a generate of their own
        # Without it, max_time would be lost on the model.
        namespace["_get_stopping_criteria"] = with_agreed_criteria(native._get_stopping_criteria)
    return type(native.__name__, (_ShardedPretrained, native), namespace)


class PretrainedPolicy(Policy):
    """Base of policies for transformers models: what worked before sharding works after it."""

    @override
    def set_model(self, model: nn.Module) -> None:
        """Make ``model`` available to the other methods as ``self.model``.

        Raises:
            NotSupportedError: this release of transformers generates in another way than shardcore knows.
        """
        _private.require("generation")
        super().set_model(model)

    def new_model_class(self) -> type[nn.Module] | None:
        """Return the model's class with `generate` and `save_pretrained` for sharded models."""
        return _sharded_class(type(self.model))

    def new_part_class(self, part: nn.Module) -> type[nn.Module] | None:
        """Return the same for the models of transformers inside of the model (``model.model``, an encoder)."""
        return _sharded_class(type(part)) if isinstance(part, PreTrainedModel) else None

    @override
    def builder(self, model: nn.Module) -> Callable[[], nn.Module] | None:
        """Return what builds a new model from the configuration of ``model``."""
        added = (ParallelModule, FSDPModule, _ShardedPretrained)
        native: Any = next(cls for cls in type(model).__mro__ if not issubclass(cls, added))
        return lambda: native(copy.deepcopy(model.config))

    @override
    def flash_attention(self, device_type: str, *, asked: bool | str) -> Step:
        """Return the step that sets transformers' ``attn_implementation`` to flash-attn 4, 3 or 2.

        Arguments and errors are those of `Policy.flash_attention`.
        """
        return choose_flash_attention(self.model, device_type, asked=asked)

    @override
    def recompute(self, path: str, block: nn.Module) -> Step:
        """Return the step that switches on transformers' own checkpointing of ``block``; its cache is left out then.

        Errors are those of `Policy.recompute`.
        """
        return recompute_layer(path, block)


class BaseModelPolicy(PretrainedPolicy):
    """Base of policies for a base model of transformers and for all classes that put a head behind it.

    ``stages`` are those of the base model (``GPT2Model``). A model with a head (``GPT2LMHeadModel``) has them under the
    name of the base model in it, and the head's modules are in the last stage. Of an encoder and a decoder one may be
    missing.
    """

    #: The linears that score words, as far as a class has them: split over the vocabulary.
    words: ClassVar[tuple[str, ...]] = ("lm_head",)
    #: What makes labels or scores of the states, as far as a class has it: whole on each rank.
    labels: ClassVar[tuple[str, ...]] = ("score", "classifier", "qa_outputs")

    @override
    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        if (stages := type(self).stages) is not None:
            stages = _of_one_stack(stages, self.base)
            own = (*model._modules, *model._parameters, *model._buffers)
            then = tuple(name for name in own if name != self.inside)
            self.stages = stages.under(self.inside, then=then) if self.inside else stages

    @property
    def inside(self) -> str:
        """The name of the base model in the model; nothing if the model has no head."""
        names = (self.model.base_model_prefix, "model")  # Llama 4 for text has the prefix of the model with images
        return next((name for name in names if name and hasattr(self.model, name)), "")

    @property
    def base(self) -> Any:
        """The base model, in the model or the model itself."""
        return self.model.get_submodule(self.inside)

    def heads(self) -> ModulePolicy:
        """Return the rules of the head, if there is one."""
        rules = [head(*self.words, optional=True), replicate(*self.labels, optional=True)]
        return {self.model: rules} if self.inside else {}


def _of_one_stack(stages: Stages, model: nn.Module) -> Stages:
    """Return the stages of an encoder and a decoder for a model that lacks one of them; else ``stages``."""
    there = stages.mapped(lambda name: None if "." in name and not hasattr(model, name.partition(".")[0]) else name)
    if (len(there.lists), len(stages.lists)) != (1, 2):
        return stages

    def held(*parts: str) -> tuple[str, ...]:
        return tuple(name for part, name in there.parts() if part in parts)

    if there.lists == stages.lists[:1]:
        return replace(there, between=(), last=held("between", "last"))
    return replace(there, first=held("first", "between"), between=())
