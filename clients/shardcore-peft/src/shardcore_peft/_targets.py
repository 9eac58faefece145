"""Whether every module that is to get an adapter can have one, before anything is changed.

Of a model that is sharded already its modules tell; of one that is not, what its plan makes of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import peft.utils
from peft import PeftType
from peft.tuners import tuners_utils
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.nn.experts.tensor_parallel import ExpertTensorParallel
from shardcore.plan import ShardPlan
from shardcore_peft._checks import PARAMETERS, check_base, check_layer, check_tied_targets
from shardcore_peft._copies import check_copied, parts_of
from shardcore_peft._forms import check_scales, forms_at, scales_at
from shardcore_peft._sites import Site, inner_name, nested, sites
from shardcore_transformers import _private

#: What a plan makes of modules: by path, each class and its options.
Planned = Mapping[str, Sequence[tuple[type, Mapping[str, Any]]]]


def planned_of(plan: ShardPlan) -> Planned:
    """Return what ``plan`` makes of the modules of a model."""
    made: dict[str, list[tuple[type, Mapping[str, Any]]]] = {}
    for step in plan.steps:
        options = dict(getattr(step, "options", ()))
        for path, kind in step.mixins:
            made.setdefault(path, []).append((kind, options))
    return made


def check_site(site: Site, made: Planned) -> None:
    """Refuse a layer of PEFT that has no sharded form where it is, before the model is sharded.

    Raises:
        NotSupportedError: it has none.
    """
    check_layer(site.layer, site.path)
    if isinstance(site.layer, ModulesToSaveWrapper):
        below = [
            (path[len(site.path) + 1 :], kind, bool(options.get("gather_output")))
            for path, kinds in made.items()
            if path == site.path or path.startswith(f"{site.path}.")
            for kind, options in kinds
        ]
        check_copied(site.path, below)
        return
    found = made.get(site.path, ())
    check_base(site.path, [kind for kind, _ in found])
    if isinstance(site.layer, IA3Layer):
        for kind, options in found:
            check_scales(kind, options, site.path, of_input=site.layer.is_feedforward)


def check_targets(model: nn.Module, config: Any, name: str) -> None:
    """Refuse an adapter whose settings name parameters, or modules of a sharded model that can have none.

    Args:
        model: the sharded model.
        config: the settings.
        name: of the adapter.

    Raises:
        NotSupportedError: they do.
    """
    if getattr(config, "target_parameters", None):
        raise NotSupportedError(f"the adapter {name!r} has target_parameters={config.target_parameters}; {PARAMETERS}")
    if config.is_prompt_learning:
        return
    for path, module in _outside(model):
        if any(path.endswith(saved) for saved in getattr(config, "modules_to_save", None) or ()):
            check_copied(path, parts_of(module))
    wanted = _with_defaults(config, model)
    targets = {path: module for path, module in _outside(model) if check_target_module_exists(wanted, path)}
    check_tied_targets(model, config, name, targets)
    for path, module in targets.items():
        check_base(path, [ExpertTensorParallel] if isinstance(module, ExpertTensorParallel) else ())
        if config.peft_type == PeftType.LORA:
            forms_at(module, path)
        elif config.peft_type == PeftType.IA3:
            scales_at(module, path, of_input=_is_feedforward(wanted, path))


def _outside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the native modules of ``model`` by their paths without adapters, and nothing of adapters that it has."""
    held = {site.path: nested(site.layer)[-1] for site in sites(model)}
    inside = tuple(f"{path}." for path in held)
    for path, module in model.named_modules():
        if path and not path.startswith(inside):
            layer = held.get(path)
            native = module if layer is None else layer._modules[inner_name(layer)]
            if native is not None:
                yield path, native


def _with_defaults(config: Any, model: nn.Module) -> Any:
    """Return a copy of the settings that names modules; PEFT knows which for models of many types."""
    _private.require_peft()
    wanted = copy.deepcopy(config)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    method = getattr(config.peft_type, "value", config.peft_type)
    for name in ("target_modules", "feedforward_modules"):
        known = getattr(peft.utils, f"TRANSFORMERS_MODELS_TO_{method}_{name.upper()}_MAPPING", {})
        if getattr(wanted, name, ()) is None:
            setattr(wanted, name, set(known.get(kind, ())))
    return tuners_utils._maybe_include_all_linear_layers(wanted, model)


def _is_feedforward(config: Any, path: str) -> bool:
    names = config.feedforward_modules
    return bool(re.fullmatch(names, path)) if isinstance(names, str) else any(path.endswith(name) for name in names)
