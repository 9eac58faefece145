"""The copies of modules that PEFT trains in place of the native ones (``modules_to_save``), in the form of these."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.comm.parts import part_of
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn import ColumnLinear, RowLinear, VocabHead
from shardcore.nn.experts.tensor_parallel import ExpertTensorParallel
from shardcore.nn.intact import AROUND
from shardcore.nn.loading import take_full_tensors
from shardcore.nn.sequence.shard import SequenceShard

#: A module below another one: its path there, its class, and whether it gathers its output.
Part = tuple[str, type, bool]

#: The parameters of copies as PEFT made them, and in their forms: PEFT ties what stands for tied modules.
Tied = dict[nn.Parameter, nn.Parameter]


def place_copies(
    wrapper: ModulesToSaveWrapper, context: ShardContext, where: str, tied: Tied, *, has_values: bool
) -> None:
    """Give the copies of the native module of ``wrapper``, which is sharded already, its form.

    Args:
        wrapper: the layer of PEFT.
        context: of the sharded model.
        where: its path.
        tied: what other wrappers of the model have become; what this one becomes is added.
        has_values: the copies have values, as those that were made of an unsharded model do.

    Raises:
        NotSupportedError: it is a part of a region, which a copy of it would not be.
    """
    original = wrapper.original_module
    check_copied(where, parts_of(original))
    for name, plain in wrapper.modules_to_save.items():
        if any(isinstance(parameter, DTensor) for parameter in plain.parameters()):
            continue
        new = copy.deepcopy(original, _shared(original, context))
        _fill(new, plain if has_values else original, plain, tied)
        new.__dict__[AROUND] = original
        new.train(plain.training)
        wrapper.modules_to_save[name] = new
        take_full_tensors(new)
    wrapper.__dict__[AROUND] = original


def check_copied(where: str, parts: Iterable[Part]) -> None:
    """Refuse a copy of a module that has ``parts``.

    Raises:
        NotSupportedError: one of them is split as a part of a region, which a copy of it would not be.
    """
    for path, kind, gathers in parts:
        alone = issubclass(kind, VocabHead) or (issubclass(kind, ColumnLinear) and gathers)
        if issubclass(kind, RowLinear | ExpertTensorParallel) or (issubclass(kind, ColumnLinear) and not alone):
            raise NotSupportedError(
                f"modules_to_save names {where}, whose {path or 'weight'} is split as a part of a tensor-parallel "
                "region, which a copy is not. Train it with LoRA (target_modules); heads, embeddings, norms and "
                "classifiers can be named"
            )


def parts_of(module: nn.Module) -> Iterator[Part]:
    """Yield the parts of a module of a sharded model."""
    return ((path, type(part), bool(getattr(part, "gather_output", False))) for path, part in module.named_modules())


def _shared(original: nn.Module, context: ShardContext) -> dict[int, Any]:
    """Return what a copy has in common with the original, as the memo of a deep copy."""
    return {id(context): context} | {id(tokens): tokens for tokens in _tokens(original)}


def _tokens(original: nn.Module) -> Iterator[SequenceShard]:
    for module in original.modules():
        own = module.__dict__
        held = (own.get("_shard_sequence"), getattr(own.get("sole_region"), "sequence", None))
        yield from (tokens for tokens in held if isinstance(tokens, SequenceShard))


def _fill(new: nn.Module, values: nn.Module, like: nn.Module, tied: Tied) -> None:
    """Give ``new`` the values of ``values``, and let what needs a gradient in ``like``, or is tied there, be so too."""
    given, made = dict(values.named_parameters()), dict(like.named_parameters())
    for path, module in new.named_modules():
        for name, own in module._parameters.items():
            source = made.get(f"{path}.{name}" if path else name)
            if own is None or source is None:  # PEFT ties a weight alone, without the bias beside it
                module._parameters[name] = None
                continue
            if source not in tied:
                full = given[f"{path}.{name}" if path else name].detach()
                if isinstance(own, DTensor) and not isinstance(full, DTensor):
                    full = part_of(full.to(own.device).clone(), own)
                tied[source] = nn.Parameter(full.clone(), requires_grad=source.requires_grad)
            module._parameters[name] = tied[source]
    buffers = dict(values.named_buffers())
    for name, buffer in new.named_buffers():
        buffer.copy_(buffers[name])
