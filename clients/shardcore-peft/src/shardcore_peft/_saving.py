"""Saving the adapters of a sharded model in PEFT's own format: whole tensors, gathered by the one rank that writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from peft import get_peft_model_state_dict
from torch import Tensor

from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore_transformers._saving import writer_of
from shardcore_transformers.writing import Transport, WriterBarrier

_NO_CONVERSION = (
    "save_pretrained(path_initial_model_for_weight_conversion=...) of a sharded model: PEFT loads the initial adapter "
    "for it beside the other, which the rank that writes cannot do alone. Leave it out, and convert in one process: "
    "PeftModel.from_pretrained(base, folder).save_pretrained(other, path_initial_model_for_weight_conversion=...)"
)


def save_adapters(
    model: Any,
    context: ShardContext,
    native: Callable[..., None],
    save_directory: str,
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: Any = "auto",
    is_main_process: bool = True,
    **kwargs: Any,
) -> None:
    """Do what ``native``, PEFT's ``save_pretrained`` of this ``model``, does for an unsharded one.

    Errors are those of `shardcore_transformers._saving.save_pretrained`.
    """
    given = kwargs.pop("state_dict", None)
    names = list(model.peft_config) if selected_adapters is None else selected_adapters
    tensors: dict[str, Any] = {}
    failure = None
    try:
        if kwargs.get("path_initial_model_for_weight_conversion") is not None:
            raise NotSupportedError(_NO_CONVERSION)
        tensors = _wanted(model, model.state_dict() if given is None else given, names, save_embedding_layers)
    except Exception as error:  # told to the others, and raised by writer_of
        failure = error
    ranks = tuple(int(rank) for rank in context.mesh.mesh.flatten())
    barrier = WriterBarrier.wait(ranks, _report(tensors, is_main_process, failure), "PeftModel.save_pretrained")
    writer = writer_of(barrier.reports, failure)
    transport = Transport(tensors, writer)
    if dist.get_rank() != writer:
        barrier.follow(writer)
        transport.send(tensors)
        barrier.follow(writer)
        return
    with barrier.telling():
        native(
            save_directory,
            safe_serialization=safe_serialization,
            selected_adapters=selected_adapters,
            save_embedding_layers=save_embedding_layers,
            is_main_process=True,
            state_dict=transport.gather(tensors, barrier.proceed),
            **kwargs,
        )


def _wanted(model: Any, state: Mapping[str, Any], adapters: list[str], embeddings: Any) -> dict[str, Any]:
    """Return the entries of ``state`` that PEFT saves of these adapters; it gives some of them other names."""
    saved = {
        id(value)
        for name in adapters
        for value in get_peft_model_state_dict(
            model, state_dict=state, adapter_name=name, save_embedding_layers=embeddings
        ).values()
    }
    return {name: value for name, value in state.items() if id(value) in saved}


def _report(tensors: Mapping[str, Any], main: bool, failure: Exception | None) -> dict[str, Any]:
    entries = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items() if isinstance(t, Tensor)]
    return {
        "error": None if failure is None else f"{type(failure).__name__}: {failure}",
        "main": bool(main),
        "names and shapes": hashlib.sha256(repr(entries).encode()).hexdigest()[:16],
    }
