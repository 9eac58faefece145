"""The values of an adapter in the place of those of another one, as PEFT's ``hotswap_adapter`` does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peft
import torch
from peft import PeftConfig
from peft.utils import hotswap
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.apply.errors import together
from shardcore.comm.parts import part_of
from shardcore.errors import ConfigError
from shardcore.mesh.axes import group_of
from shardcore.mesh.context import nearest_context
from shardcore_peft._merging import let_go
from shardcore_peft._models import HUB
from shardcore_peft._sites import base_of, nested, own_children, sites


def hotswap_adapter(
    model: Any, model_name_or_path: Any, adapter_name: str, torch_device: str | None = None, **kwargs: Any
) -> None:
    """Do what PEFT's ``hotswap_adapter`` does, for a model that was sharded; every rank calls it.

    Args:
        model: the ``PeftModel``; an unsharded one is given to PEFT as it is.
        model_name_or_path: the folder, or the name on the hub.
        adapter_name: the adapter whose values are replaced.
        torch_device: where the values are read to.
        **kwargs: what else PEFT's own takes.

    Raises:
        ConfigError: the adapter has other ranks than its place.
        AgreementError: another rank failed, and nothing was changed.
        PartlyShardedError: PEFT failed; the model is unusable.
    """
    context = nearest_context(model)
    if context is None:
        hotswap.hotswap_adapter(model, model_name_or_path, adapter_name, torch_device, **kwargs)
        return

    group, doing = group_of(context.mesh), "swapping an adapter of"
    with together(model, group=group, doing=doing):
        hub = {name: kwargs[name] for name in HUB if name in kwargs}
        old, new = model.peft_config[adapter_name], PeftConfig.from_pretrained(model_name_or_path, **hub)
        hotswap.check_hotswap_configs_compatible(old, new)
        if (old.r, old.rank_pattern) != (new.r, new.rank_pattern):
            raise ConfigError(
                f"the adapter {adapter_name!r} has r={old.r}, rank_pattern={old.rank_pattern}, and that of "
                f"{model_name_or_path} r={new.r}, rank_pattern={new.rank_pattern}: a sharded model takes the same "
                "ones. Load it beside the other (load_adapter), switch to it (set_adapter), and delete_adapter the old"
            )
        peft.load_peft_weights(model_name_or_path, device="cpu", **hub)

    with together(model, group=group, doing=doing, changing=True), _of_whole_adapters(base_of(model)):
        hotswap.hotswap_adapter(model, model_name_or_path, adapter_name, torch_device, **kwargs)


@contextlib.contextmanager
def _of_whole_adapters(model: nn.Module) -> Iterator[None]:
    """Put whole plain tensors in the places of the parameters of all adapters; each rank copies back its part."""
    there: list[tuple[dict[str, Any], str, Any]] = []  # the DTensors, and who holds them
    for site in sites(model):
        let_go(site.layer)
        for layer in nested(site.layer):
            for child in own_children(layer).values():
                for module in child.modules():
                    held: dict[str, Any] = module._parameters
                    there.extend((held, name, p) for name, p in held.items() if isinstance(p, DTensor))
    whole = [nn.Parameter(parameter.detach().full_tensor(), requires_grad=False) for *_, parameter in there]
    for (held, name, _), full in zip(there, whole, strict=True):
        held[name] = full
    try:
        yield
    finally:
        for held, name, parameter in there:
            held[name] = parameter
    with torch.no_grad():
        for (*_, own), full in zip(there, whole, strict=True):
            own.copy_(part_of(full.detach(), own))
