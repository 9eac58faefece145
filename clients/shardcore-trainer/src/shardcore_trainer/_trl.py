"""What trainers of TRL are given with a sharded model: adapters and references in their sharded forms, or a refusal.

TRL makes both by itself: adapters by PEFT's own call, which takes their sizes from one rank's part, and a reference
from the whole checkpoint in each process. Here they are made before TRL looks for them.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardcore.errors import NotSupportedError
from shardcore_trainer._replicas import Replicas, sharded_in
from shardcore_trainer._rewards import sized_by_replicas

_REFERENCE = "ref"  # what TRL calls the adapter that it copies to be the reference


class Given:
    """The arguments of a call, by their names.

    Args:
        function: what is called, bound to its object.
        args: positional ones.
        kwargs: the others.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.names = list(inspect.signature(function).parameters)
        self.args, self.kwargs = list(args), dict(kwargs)

    def get(self, name: str) -> Any:
        """Return an argument, None if it is not given."""
        if name in self.names and self.names.index(name) < len(self.args):
            return self.args[self.names.index(name)]
        return self.kwargs.get(name)

    def set(self, name: str, value: Any) -> None:
        """Give an argument another value."""
        if self.names.index(name) < len(self.args):
            self.args[self.names.index(name)] = value
        else:
            self.kwargs[name] = value


def is_of_trl(trainer: type[Any], name: str | None = None) -> bool:
    """Tell whether a class is one of TRL's trainers, or derives from one; on wish, from the one of this name."""
    own = [cls for cls in trainer.__mro__ if cls.__module__.partition(".")[0] == "trl"]
    return any(name is None or cls.__name__ == name for cls in own)


def takes_filled_batches_only(trainer: Any) -> bool:
    """Tell whether no rows can be left out of the last batches of one replica.

    Such a trainer gathers what it reports sample by sample, inside of its loss, or has other rows than samples.
    """
    if not is_of_trl(type(trainer)):
        return False
    flat = getattr(trainer, "padding_free", False) or getattr(trainer.args, "eval_packing", False)
    return bool(flat) or not is_of_trl(type(trainer), "SFTTrainer")


def refusal_of_rows(trainer: Any, subject: str) -> str:
    """Return why an evaluation of such a trainer is refused."""
    return (
        f"{subject} not fill the batches of the {trainer._replicas.count} replicas, and {type(trainer).__name__} "
        "cannot leave out the rows that would fill them up, so that they would count twice. Evaluate so many that "
        f"per_device_eval_batch_size ({trainer.args.per_device_eval_batch_size}) x replicas divides their number"
    )


def made_ready(trainer: type[Any], given: Given) -> Callable[[Any], None]:
    """Give a trainer of TRL what it would make in an unsharded form; return what is to be done after its ``__init__``.

    Args:
        trainer: its class.
        given: the arguments of its ``__init__``, which are changed.

    Raises:
        NotSupportedError: it would compute something else than with the unsharded model, or fail.
    """
    model, args = given.get("model"), given.get("args")
    if not is_of_trl(trainer) or (sharded := sharded_in(model)) is None:
        return lambda _: None
    _refuse(trainer, given, sharded)
    if args is not None:
        given.set("args", args := sized_by_replicas(args, Replicas.of(sharded)))
    if "peft_config" in given.names and given.get("peft_config") is not None and not _has_adapters(model):
        if given.get("ref_model") is not None and not getattr(args, "force_use_ref_model", True):
            return _complete  # TRL refuses both together
        complete = _attach(given, args)
        _cast_adapters(given.get("model"))
        return complete
    _cast_adapters(model)
    if "ref_model" in given.names and given.get("ref_model") is None and not _has_adapters(model):
        given.set("ref_model", _reference(model, args))
    return _complete


def _cast_adapters(model: Any) -> None:
    """Cast to bfloat16 what TRL casts for QLoRA by assignments to ``.data``, which DTensors ignore."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    for path, module in model.named_modules():
        trained = any(p is not None and p.requires_grad for p in module._parameters.values())
        if trained and "lora_magnitude_vector" not in path:
            module.to(torch.bfloat16)


def _complete(trainer: Any) -> None:
    """Size what TRL has sized by ranks, and refuse now what an evaluation in the middle of the training would refuse.

    Raises:
        NotSupportedError: the last batches would be filled up, and cannot be.
    """
    trainer.args = sized_by_replicas(trainer.args, trainer._replicas)
    given = trainer.eval_dataset
    rows = trainer.args.per_device_eval_batch_size * trainer._replicas.count
    answers = getattr(trainer, "num_generations_eval", None) or getattr(trainer, "num_generations", 1)
    if given is not None and rows % answers:
        raise NotSupportedError(
            f"{rows} answers are evaluated at a time (per_device_eval_batch_size x replicas), which are no whole "
            f"groups of {answers} answers to one prompt. Raise per_device_eval_batch_size"
        )
    if trainer._replicas.count == 1 or not takes_filled_batches_only(trainer):
        return
    for data in given.values() if isinstance(given, Mapping) else [given]:
        samples = len(data) if hasattr(data, "__len__") else 0
        if samples % rows:
            raise NotSupportedError(refusal_of_rows(trainer, f"{samples} samples of eval_dataset do"))


def _has_adapters(model: Any) -> bool:
    if importlib.util.find_spec("peft") is None:
        return False
    import peft

    return isinstance(model, peft.PeftModel)


def _attach(given: Given, args: Any) -> Callable[[Any], None]:
    from shardcore_peft import get_peft_model

    if args is not None:
        transformers.set_seed(args.seed)  # as TRL does before it draws the values of adapters
    given.set("model", get_peft_model(given.get("model"), given.get("peft_config")))
    given.set("peft_config", None)
    return _without_reference_adapter


def _without_reference_adapter(trainer: Any) -> None:
    """Remove the copy that TRL makes of an adapter which it was given; the reference is the model without adapters.

    It is what TRL does with ``peft_config``, and the same as an adapter that adds nothing yet.
    """
    if _REFERENCE in trainer.model.peft_config:
        trainer.model.delete_adapter(_REFERENCE)
    _complete(trainer)


def _reference(model: Any, args: Any) -> Any:
    """Return the model as it is before the training."""
    if getattr(args, "precompute_ref_log_probs", False):
        return None
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise NotSupportedError(
            "ref_model=None makes a copy of the model, and torch cannot copy what FSDP2 has divided among "
            "data-parallel replicas. Pass ref_model=, sharded in the same way: shardcore.shard("
            "AutoModelForCausalLM.from_pretrained(path), ...)"
        )
    return copy.deepcopy(model).requires_grad_(False).eval()


def _refuse(trainer: type[Any], given: Given, sharded: nn.Module) -> None:
    name, args = trainer.__name__, given.get("args")
    if getattr(args, "precompute_ref_log_probs", False) and _uses(trainer, "hash_module"):
        raise NotSupportedError(
            f"precompute_ref_log_probs=True lets {name} make a hash of all parameters, which it cannot do with those "
            "of a sharded model. Leave it out: the reference is computed in each step"
        )
    replicas = Replicas.of(sharded)
    copies = "ref_model" in given.names and given.get("ref_model") is None and _uses(trainer, "use_adapter")
    if replicas.count > 1 and copies and _has_adapters(given.get("model")):
        raise NotSupportedError(
            f"{name} without ref_model= adds a copy of the adapter to the model, and FSDP2 has divided it among "
            f"{replicas.count} replicas already. Pass ref_model=, sharded in the same way, without adapters if the "
            "adapter is new"
        )


def _uses(trainer: type[Any], name: str) -> bool:
    """Tell whether a module of TRL that defines the trainer has imported ``name``."""
    modules = [sys.modules.get(cls.__module__) for cls in trainer.__mro__ if cls.__module__.startswith("trl.")]
    return any(getattr(module, name, None) is not None for module in modules)
