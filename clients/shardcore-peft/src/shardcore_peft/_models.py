"""Models with adapters on several ranks: what PEFT's own calls do there beside what they do for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import peft
import torch.distributed as dist
from peft import PeftConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardcore.agree.agreement import Report, agree
from shardcore.apply.errors import together
from shardcore.errors import ConfigError, NotSupportedError, WrapError
from shardcore.fsdp.units import unit_of
from shardcore.mesh.axes import Sizes, group_of
from shardcore.mesh.context import ShardContext, nearest_context, set_context, set_part_of
from shardcore.nn import ParallelMixin
from shardcore.nn.intact import AROUND
from shardcore.nn.mixin import add_mixin
from shardcore_peft._checks import check_method, check_new
from shardcore_peft._copies import Tied
from shardcore_peft._dora import begin_with_norms
from shardcore_peft._layers import is_new, keep_on_replicas, place
from shardcore_peft._merging import let_merge
from shardcore_peft._prompts import keep_own_heads, place_prompts
from shardcore_peft._saving import save_adapters
from shardcore_peft._sites import base_of, inner_name, own_children, sites
from shardcore_peft._targets import check_targets
from shardcore_peft._whole import of_whole_sizes

Result = TypeVar("Result")

_ADDING = "_shard_adding"  # on a model that an adapter is being added to

_LOADING = "_shard_loading"  # on a model whose new adapter is read from a file

#: Where PEFT finds an adapter that is not in a folder.
HUB = ("revision", "token", "cache_dir", "subfolder")

_PREFIX = "base_model.model."  # of the names in a saved adapter


class ShardedPeft(ParallelMixin):
    """A ``PeftModel`` around a sharded model: adapters that are added get their forms, and are saved whole, once."""

    keeps_name: ClassVar[bool] = True

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        """Add an adapter on all ranks; takes what PEFT's own takes.

        Raises:
            NotSupportedError: it has no sharded form.
        """
        _refuse_meta(kwargs)
        native = super().add_adapter  # type: ignore[misc]  # of the native class
        model: Any = self
        adding(model, peft_config, adapter_name, lambda: native(adapter_name, peft_config, *args, **kwargs))

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter in PEFT's format, which every rank reads, and of which it keeps its part."""
        _refuse_meta(kwargs)
        with _loading(base_of(self)):
            return super().load_adapter(*args, **kwargs)  # type: ignore[misc]  # of the native class

    def get_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prompts, or this rank's heads of the keys and values of prefixes; takes what PEFT's own takes."""
        found = super().get_prompt(*args, **kwargs)  # type: ignore[misc]  # of the native class
        model: Any = self
        context = nearest_context(model)
        if context is None or context.size == 1 or model.active_peft_config.peft_type != PeftType.PREFIX_TUNING:
            return found
        return keep_own_heads(model, found, context)

    def save_pretrained(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """Save the adapters in PEFT's format; every rank calls it, and one writes.

        Takes what PEFT's own takes. The first rank writes, or the first of those that pass ``is_main_process=True``.

        Raises:
            MissingRanksError: some ranks did not call it.
            AgreementError: another rank failed.
        """
        native = super().save_pretrained  # type: ignore[misc]  # of the native class
        context = nearest_context(self)
        assert context is not None
        save_adapters(self, context, native, save_directory, *args, **kwargs)

    def _get_base_model_class(self, is_prompt_tuning: bool = False) -> type:
        """Return the class that a saved adapter names: FSDP2 has put one of its own on top of it."""
        given: type = super()._get_base_model_class(is_prompt_tuning)  # type: ignore[misc]  # of the native class
        return next(cls for cls in given.__mro__ if not issubclass(cls, FSDPModule))


class ShardedTuner(ParallelMixin):
    """What PEFT has around a sharded model: whatever adds adapters to it comes here."""

    keeps_name: ClassVar[bool] = True

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add the adapter on all ranks; takes what PEFT's own takes."""
        native = super().inject_adapter  # type: ignore[misc]  # of the native class
        config: Any = self.peft_config
        adding(model, config[adapter_name], adapter_name, lambda: native(model, adapter_name, *args, **kwargs))

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: PEFT would assign whole tensors to what each rank has a part of."""
        raise NotSupportedError(
            "add_weighted_adapter on a sharded model: it assigns tensors to the data of parameters, which torch "
            "ignores for the parts that ranks hold. Save the adapters, combine them in one process, and load the result"
        )


def serve(model: nn.Module, context: ShardContext) -> None:
    """Let the calls of a ``PeftModel`` around a model that was sharded do what several ranks need."""
    if isinstance(model, PeftModel):
        add_mixin(model, ShardedPeft)
        set_context(model, context)  # what it does for a sharded model, people call with this one
        set_part_of(model.base_model, context)
        place_prompts(model, context)
        if isinstance(model.base_model, BaseTuner):
            add_mixin(model.base_model, ShardedTuner)


def get_peft_model(model: Any, peft_config: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
    """Do what PEFT's ``get_peft_model`` does, for a model that was sharded; every rank calls it.

    The adapters get the values that the first rank has drawn.

    Args:
        model: the sharded model; an unsharded one is given to PEFT as it is.
        peft_config: the settings.
        adapter_name: the name of the adapter.
        **kwargs: what else PEFT's own takes.

    Raises:
        NotSupportedError: the method, or the adapter of a layer, has no sharded form.
        PartlyShardedError: PEFT failed; the model is unusable.
    """
    context = nearest_context(model)
    if context is None:
        return peft.get_peft_model(model, peft_config, adapter_name, **kwargs)
    _refuse_meta(kwargs)
    made = adding(
        model, peft_config, adapter_name, lambda: peft.get_peft_model(model, peft_config, adapter_name, **kwargs)
    )
    serve(made, context)
    return made


def from_pretrained(
    model: Any, model_id: Any, adapter_name: str = "default", is_trainable: bool = False, **kwargs: Any
) -> Any:
    """Do what ``PeftModel.from_pretrained`` does, for a model that was sharded; every rank calls it.

    Args:
        model: the sharded model; an unsharded one is given to PEFT as it is.
        model_id: the folder, or the name on the hub.
        adapter_name: the name of the adapter.
        is_trainable: whether it is to be trained further.
        **kwargs: what ``load_adapter`` takes.

    Raises:
        NotSupportedError: the method, or the adapter of a layer, has no sharded form.
    """
    if nearest_context(model) is None:
        return PeftModel.from_pretrained(model, model_id, adapter_name, is_trainable, **kwargs)
    hub = {name: kwargs[name] for name in HUB if name in kwargs}
    config = PeftConfig.from_pretrained(model_id, **hub)
    config.inference_mode = not is_trainable
    config.base_model_name_or_path = model.__dict__.get("name_or_path", None) or None
    with _loading(model):
        made = get_peft_model(model, config, adapter_name)
    made.load_adapter(model_id, adapter_name, is_trainable=is_trainable, **kwargs)
    return made


def load_into(
    model: Any,
    peft_model_id: str | None = None,
    adapter_name: str | None = None,
    peft_config: Any = None,
    adapter_state_dict: dict[str, Any] | None = None,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    """Do what ``load_adapter`` of a transformers model does, for one that was sharded; every rank calls it.

    Args:
        model: the sharded model.
        peft_model_id: the folder, or the name on the hub.
        adapter_name: the name of the adapter; "default" if none is given.
        peft_config: its settings, or a dict of them; read from ``peft_model_id`` if none are given.
        adapter_state_dict: its whole tensors; read from ``peft_model_id`` if none are given.
        is_trainable: whether it is to be trained further.
        **kwargs: ``revision``, ``token``, ``cache_dir``, ``subfolder``.

    Raises:
        NotSupportedError: another argument is given, or the adapter has no sharded form.
    """
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    if kwargs:
        raise NotSupportedError(
            f"load_adapter of a sharded {type(model).__name__} does not take {', '.join(sorted(kwargs))}; leave it out"
        )
    name = adapter_name or "default"
    if peft_config is None:
        peft_config = PeftConfig.from_pretrained(peft_model_id, **hub)
    elif not isinstance(peft_config, PeftConfig):
        peft_config = peft.get_peft_config(dict(peft_config))
    peft_config.inference_mode = not is_trainable
    state = adapter_state_dict or peft.load_peft_weights(peft_model_id, device="cpu", **hub)
    state = {key.removeprefix(_PREFIX): value for key, value in state.items()}  # this model is no PeftModel
    with _loading(model):
        model.add_adapter(peft_config, name)
    found = peft.set_peft_model_state_dict(model, state, name)
    if not is_trainable:
        model.eval()
    return found


def adding(model: nn.Module, config: Any, name: str, work: Callable[[], Result]) -> Result:
    """Let ``work``, which is PEFT's, add the adapter ``name`` to ``model``, and give it its forms, on every rank.

    Args:
        model: a sharded model, or a ``PeftModel`` around one.
        config: the settings of the adapter.
        name: of the adapter.
        work: what adds it.

    Raises:
        NotSupportedError: it has no sharded form.
        AgreementError: another rank failed, or has made something else.
        PartlyShardedError: it failed after the model was changed.
    """
    context = nearest_context(model)
    inner = base_of(model)
    if context is None or _ADDING in inner.__dict__:  # what adds it does so by another call that comes here
        return work()
    group, doing = group_of(context.mesh), "adding an adapter to"
    with together(model, group=group, doing=doing):
        _check(inner, config, name, context)
    if Sizes.of(context.parameters).ranks == 1:
        return work()
    with together(model, group=group, doing=doing, changing=True):
        if config.is_prompt_learning:
            result = work()  # it looks at the table of the model, and makes nothing inside of it
        else:
            inner.__dict__[_ADDING] = True
            try:
                with of_whole_sizes(inner):
                    result = work()
            finally:
                del inner.__dict__[_ADDING]
    new = _new_parameters(result if isinstance(result, nn.Module) else model, inner)
    told = tuple((f"the parameter {name}", f"{tuple(p.shape)} {p.dtype}") for name, p in new.items())
    agree(Report(items=told), group=group)
    with together(model, group=group, doing=doing, changing=True):
        _give_forms(new, inner, context)
    if isinstance(model, PeftModel):
        place_prompts(model, context)
    return result


@contextlib.contextmanager
def _loading(model: nn.Module) -> Iterator[None]:
    """Say of ``model`` that the values of adapters which are added to it come from a file."""
    model.__dict__[_LOADING] = True
    try:
        yield
    finally:
        model.__dict__.pop(_LOADING, None)


def refuse_unplaced(model: nn.Module) -> None:
    """Refuse layers that PEFT has put around parallel modules by itself, as soon as it says that it has.

    Raises:
        WrapError: there are some: their sizes are those of one rank's part.
    """
    for site in sites(model):
        inner = site.layer._modules[inner_name(site.layer)]
        held = () if inner is None else inner.parameters()
        if AROUND not in site.layer.__dict__ and any(isinstance(parameter, DTensor) for parameter in held):
            raise WrapError(
                f"PEFT has put a {type(site.layer).__module__}.{type(site.layer).__qualname__} around {site.path} of "
                f"this sharded {type(model).__name__}, with the sizes of one rank's part, and has changed the model: "
                "build it anew. Attach adapters before shard(), as shard(get_peft_model(model, config)), or after it "
                "by shardcore_peft.get_peft_model(model, config), or from_pretrained(model, folder) there"
            )


def _check(inner: nn.Module, config: Any, name: str, context: ShardContext) -> None:
    sizes = Sizes.of(context.parameters)  # ranks that divide the tokens of a batch are replicas to gradients
    if not isinstance(config, PeftConfig):
        raise ConfigError(f"the settings of an adapter are a peft.PeftConfig, got a {type(config).__name__}")
    inside, saved = not config.is_prompt_learning, sorted(set(getattr(config, "modules_to_save", None) or ()))
    if sizes.replicas > 1 and inside and (saved or context.defers or unit_of(inner) is None):
        raise NotSupportedError(
            f"an adapter is added to a model that has {sizes.replicas} data-parallel replicas, with "
            + (
                f"modules_to_save={saved}, which are parts of what FSDP2 has divided already"
                if saved
                else 'partial_gradients="deferred"'
                if context.defers
                else "wrap=False, so that nobody averages gradients"
            )
            + ". Attach it before shard(), as shard(get_peft_model(model, config), dp=...)"
        )
    if sizes.pp > 1:
        raise NotSupportedError(
            "an adapter is added to a model that is divided among the ranks of a pipeline: leave pp out"
        )
    check_method(config, name, ranks=sizes.tp, replicas=sizes.replicas)
    check_new(config, name, several=sizes.tp * sizes.replicas > 1, loaded=_LOADING in inner.__dict__)
    if sizes.tp > 1:
        check_targets(inner, config, name)


def _new_parameters(outer: nn.Module, inner: nn.Module) -> dict[str, nn.Parameter]:
    new = {
        f"{site.path}.{name}.{own}": parameter
        for site in sites(inner)
        if not isinstance(site.layer, AuxiliaryTrainingWrapper)  # copies of what the model has
        for name, child in own_children(site.layer).items()
        for own, parameter in child.named_parameters()
        if is_new(parameter)
    }
    encoders = getattr(outer, "prompt_encoder", None) if isinstance(outer, PeftModel) else None
    if isinstance(encoders, nn.Module):
        new |= {f"prompt_encoder.{own}": parameter for own, parameter in encoders.named_parameters()}
    return new


def _give_forms(new: Mapping[str, nn.Parameter], inner: nn.Module, context: ShardContext) -> None:
    first, group = int(context.mesh.mesh.flatten()[0]), group_of(context.mesh)
    for parameter in new.values():
        dist.broadcast(parameter.data, first, group=group)
    tied: Tied = {}
    for site in sites(inner):
        held: Any = site.layer._modules.get("lora_magnitude_vector") or {}
        begin = [name for name, magnitude in held.items() if is_new(magnitude.weight)]
        if context.size > 1:
            place(site.layer, context, site.path, tied, has_values=False)
        else:
            let_merge(site.layer, context)
        for name in begin:  # PEFT has looked at a base without values
            begin_with_norms(site.layer, name)
        if context.replica_groups:
            keep_on_replicas(site.layer, context)


def _refuse_meta(kwargs: dict[str, Any]) -> None:
    if kwargs.get("low_cpu_mem_usage"):
        raise NotSupportedError(
            "low_cpu_mem_usage=True makes adapters without values; the parts of a sharded model cannot take their "
            "place later. Leave it out: adapters are small"
        )
