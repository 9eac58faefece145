"""Adapters of PEFT on a model that is being sharded: taken off its layers, and put back in their sharded forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from peft import PeftModel
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from shardcore.agree.fingerprint import Item, model_items, tensor_items
from shardcore.clients import Attached
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.plan import ShardPlan
from shardcore_peft._checks import TOKENS, check_method
from shardcore_peft._copies import Tied
from shardcore_peft._layers import place
from shardcore_peft._merging import let_merge
from shardcore_peft._models import serve
from shardcore_peft._sites import base_of, inner_name, let_be_of_linears, nested, own_children, sites
from shardcore_peft._targets import check_site, planned_of


def attached_to(model: nn.Module) -> AttachedAdapters | None:
    """Return the adapters of PEFT that ``model`` has, or None.

    Raises:
        NotSupportedError: they are on a model inside of another one, or none of them can be sharded.
    """
    if not isinstance(model, PeftModel) and not any(True for _ in sites(model)):
        return None
    return AttachedAdapters(model)


class AttachedAdapters(Attached):
    """The adapters of one model.

    Args:
        model: a ``PeftModel``, or a model with layers of PEFT.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outer = model
        self.model = base_of(model)
        self._sites = list(sites(self.model))
        self._of_quantized: list[tuple[nn.Module, type[nn.Module]]] = []
        for site in self._sites:
            if isinstance(site.layer, TrainableTokensWrapper):
                raise NotSupportedError(f"an adapter has trainable_token_indices, at {site.path}; {TOKENS}")

    def check(self, plan: ShardPlan) -> None:
        """Refuse what is known to have no sharded form, before anything is changed."""
        config = plan.config
        ranks = config.tensor_parallel_size or 1
        replicas = (config.data_parallel_size or 1) * (config.context_parallel_size or 1)  # to gradients
        if (config.pipeline_parallel_size or 1) > 1:
            raise NotSupportedError(
                f"adapters on a {type(self.model).__name__} that is divided among the ranks of a pipeline are not "
                "supported: leave pp out, or merge them first (merge_and_unload() in PEFT)"
            )
        for name, settings in self._methods().items():
            check_method(settings, name, ranks=ranks, replicas=replicas)
        if ranks > 1:
            made = planned_of(plan)
            for site in self._sites:
                check_site(site, made)

    def items(self) -> Iterator[Item]:
        """Yield kinds, settings and shapes of all adapters, and their values where they are not those of one rank."""
        yield "the class around the model", f"{type(self.outer).__module__}.{type(self.outer).__qualname__}"
        for name, config in sorted(self._methods().items()):
            for key, value in sorted(config.to_dict().items()):
                text = str(sorted(value) if isinstance(value, Set) else value)
                yield f"the setting {key} of the adapter {name!r}", text
        held = self._held()
        yield from model_items(held)
        for items in tensor_items(held, values=self.receive is None):
            yield from items

    def _held(self) -> nn.ModuleDict:
        """Return all adapters, by the paths of their layers."""
        return nn.ModuleDict(
            {
                f"{site.path.replace('.', '/')}{f' {depth}' if depth else ''}": nn.ModuleDict(own_children(layer))
                for site in self._sites
                for depth, layer in enumerate(nested(site.layer))
            }
        )

    def begin(self) -> None:
        """Put the native modules in the places of the layers."""
        for site in self._sites:
            layer = nested(site.layer)[-1]
            site.parent._modules[site.name] = layer._modules[inner_name(layer)]
            self._of_quantized += let_be_of_linears(site.layer)

    def give_up(self) -> None:
        """Put the layers back as they were."""
        for site in self._sites:
            site.parent._modules[site.name] = site.layer
        for layer, kind in self._of_quantized:
            layer.__class__ = kind

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Put the layers around what their native modules have become, and shard their adapters likewise.

        Raises:
            NotSupportedError: a layer is around a module of which nothing is known.
        """
        if context is None:
            self.give_up()
            return
        if self.receive is not None:
            self.receive(self._held())
        tied: Tied = {}
        for site in self._sites:
            layer = nested(site.layer)[-1]
            layer._modules[inner_name(layer)] = site.parent._modules[site.name]
            site.parent._modules[site.name] = site.layer
            if context.size > 1:
                place(site.layer, context, site.path, tied, has_values=True)
            elif context.replica_groups:
                let_merge(site.layer, context)
        if context.size == 1:  # FSDP2 divides them with the model
            self.model.__dict__["_shard_intact"].accept(self.model)
        serve(self.outer, context)

    def _methods(self) -> Mapping[str, Any]:
        return getattr(self.outer, "peft_config", {})
