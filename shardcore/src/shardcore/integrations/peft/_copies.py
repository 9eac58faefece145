"""The copies of modules that PEFT trains in place of the native ones (``modules_to_save``), in the form of these."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.comm.parts import part_of
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext
from shardcore.nn import ColumnLinear, RowLinear, SwappedModule, VocabHead
from shardcore.nn.intact import AROUND
from shardcore.nn.loading import take_full_tensors
from shardcore.nn.sequence.tokens import SequenceShard

__all__ = ["place_copies"]


def place_copies(wrapper: ModulesToSaveWrapper, context: ShardContext, where: str) -> None:
    """Give the copies of the native module of ``wrapper``, which is sharded already, its form.

    Raises:
        NotSupportedError: it is a part of a region, which a copy of it would not be.
    """
    original = wrapper.original_module
    for path, module in original.named_modules():
        alone = isinstance(module, VocabHead) or (isinstance(module, ColumnLinear) and module.gather_output)
        if isinstance(module, RowLinear) or (isinstance(module, ColumnLinear) and not alone):
            raise NotSupportedError(
                f"modules_to_save names {where}, whose {path or 'weight'} is split as a part of a tensor-parallel "
                "region, which a copy is not. Train it with LoRA (target_modules); heads, embeddings, norms and "
                "classifiers can be named"
            )
    for name, plain in wrapper.modules_to_save.items():
        if any(isinstance(parameter, DTensor) for parameter in plain.parameters()):
            continue
        # PEFT copies a module of a sharded model together with its context; what it holds then has no values.
        made_after = any(isinstance(module, SwappedModule) for module in plain.modules())
        new = copy.deepcopy(original, _shared(original, context))
        _fill(new, original if made_after else plain, plain)
        new.__dict__[AROUND] = original
        new.train(plain.training)
        wrapper.modules_to_save[name] = new
        take_full_tensors(new)
    wrapper.__dict__[AROUND] = original


def _shared(original: nn.Module, context: ShardContext) -> dict[int, Any]:
    """Return what a copy has in common with the original, as the memo of a deep copy."""
    return {id(context): context} | {id(tokens): tokens for tokens in _tokens(original)}


def _tokens(original: nn.Module) -> Iterator[SequenceShard]:
    for module in original.modules():
        held = [module.__dict__.get(name) for name in ("_shard_sequence", "sequence")]
        held.append(getattr(module.__dict__.get("sole_region"), "sequence", None))
        yield from (tokens for tokens in held if isinstance(tokens, SequenceShard))


def _fill(new: nn.Module, values: nn.Module, like: nn.Module) -> None:
    """Give ``new`` the values of ``values``, and let what needs a gradient in ``like`` need one."""
    given, needs = dict(values.named_parameters()), dict(like.named_parameters())
    for path, module in new.named_modules():
        for name, own in module._parameters.items():
            if own is None:
                continue
            full = given[f"{path}.{name}" if path else name].detach()
            if isinstance(own, DTensor) and not isinstance(full, DTensor):
                full = part_of(full.to(own.device).clone(), own)
            trains = needs[f"{path}.{name}" if path else name].requires_grad
            module._parameters[name] = nn.Parameter(full.clone(), requires_grad=trains)
    buffers = dict(values.named_buffers())
    for name, buffer in new.named_buffers():
        buffer.copy_(buffers[name])
