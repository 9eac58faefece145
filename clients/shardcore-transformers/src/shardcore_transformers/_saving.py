"""Saving a sharded transformers model as one standard checkpoint, a tensor at a time.

Every rank knows from names, shapes and placements alone which files there will be, which rank holds which part of every
tensor and in which order the parts travel; so nothing is gathered but the weights themselves, and those by one rank
only, the *writer*. It holds one file at a time, the others never more than a part on its way. Everything that is not
weights (configurations, custom code, model card, upload) is written by transformers, on the writer.

How the ranks meet and how the parts travel is in `writing`,
how transformers is called in `_native`, and how an earlier checkpoint gives way to the new one in `_placing`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from shardcore._private import SAVING, require
from shardcore.comm.dtensor_params import local_tensor
from shardcore.comm.parts import check_parts
from shardcore.errors import AgreementError, ConfigError, NotSupportedError
from shardcore.mesh.context import ShardContext, division_of
from shardcore_transformers import _private
from shardcore_transformers._native import Call
from shardcore_transformers.writing import Transport, WriterBarrier


def save_pretrained(
    model: nn.Module, context: ShardContext, native: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Do what ``native``, transformers' ``save_pretrained`` of this ``model``, does for an unsharded model.

    Every rank of the model calls it. The writer is the first rank of the mesh among those that pass
    ``is_main_process=True``. A ``state_dict`` of the user's whose tensors are whole is written by the first rank of the
    mesh, without waiting for anybody; one with DTensors is gathered as the model's own is. A model whose weights
    transformers converts on saving (or that has adapters, or tensors shared without being declared as tied) is gathered
    whole on the writer and handed to ``native``.

    A process that is killed at any instant leaves the earlier checkpoint or the new one.

    Raises:
        MissingRanksError: for as long as the timeout of the process group some ranks did not call it, which every rank
            that did says; or the writer gave no sign of life, which the ranks that follow it say.
        ConfigError: no rank passes ``is_main_process=True``, or the weights are on the meta device.
        NotSupportedError: a format other than safetensors is wanted.
        AgreementError: another rank failed, or asks for something else.
        OSError: on the writer only, what could not be written.
    """
    if division_of(model) is not None:
        raise NotSupportedError(
            f"save_pretrained of a {type(model).__name__} that is divided among the ranks of a pipeline is not "
            "supported: no rank has all of it. Use shardcore.save_checkpoint(folder, model), and then the command "
            "'shardcore convert folder model', which writes what save_pretrained would"
        )
    call = Call.of(model, native, *args, **kwargs)
    state = call.arguments["state_dict"]
    if state is not None and not any(isinstance(value, DTensor) for value in state.values()):
        if call.arguments["is_main_process"] and dist.get_rank() == int(context.mesh.mesh.flatten()[0]):
            _write_whole(call, state)
        return
    plan, failure = None, None
    try:
        plan = Plan.of(model, call)
    except Exception as error:  # told to the others, and raised by writer_of
        failure = error
    ranks = tuple(int(rank) for rank in context.mesh.mesh.flatten())
    barrier = WriterBarrier.wait(ranks, _report(call.arguments, plan, failure), "save_pretrained")
    writer = writer_of(barrier.reports, failure)
    assert plan is not None
    _carry_out(call, plan, barrier, writer)


def _carry_out(call: Call, plan: Plan, barrier: WriterBarrier, writer: int) -> None:
    """Write on the writer, and on the others send it what it lacks; returns when all is written."""
    transport = Transport(plan.tensors, writer, reuses=not plan.whole)
    if dist.get_rank() == writer:
        with barrier.telling():
            _write(call, plan, transport, barrier)
    else:
        for names in plan.files.values():
            barrier.follow(writer)
            transport.send(names)
        barrier.follow(writer)


def _report(arguments: Mapping[str, Any], plan: Plan | None, failure: Exception | None) -> dict[str, Any]:
    return {
        "error": None if failure is None else f"{type(failure).__name__}: {failure}",
        "main": bool(arguments["is_main_process"]),
        "max_shard_size": str(arguments["max_shard_size"]),
        "names and shapes": None if plan is None else plan.digest,
    }


def writer_of(reports: Mapping[int, Mapping[str, Any]], failure: Exception | None) -> int:
    """Return the rank that writes.

    Raises:
        Exception: ``failure``, on the rank that failed.
        AgreementError: another rank failed, or the ranks differ.
        ConfigError: no rank would write.
    """
    if failure is not None:
        raise failure
    first, *others = reports
    for rank, report in reports.items():
        if report["error"] is not None:
            raise AgreementError(f"rank {rank} cannot save, so nothing was written. Its error: {report['error']}")
    for rank, item in itertools.product(others, ("max_shard_size", "names and shapes")):
        if reports[rank].get(item) != reports[first].get(item):
            raise AgreementError(
                f"save_pretrained: ranks {first} and {rank} differ in {item}: {reports[first][item]} and "
                f"{reports[rank][item]}. Nothing was written; call it on the same model with the same arguments."
            )
    writers = [rank for rank, report in reports.items() if report["main"]]
    if not writers:
        raise ConfigError(
            f"save_pretrained: all ranks ({', '.join(map(str, reports))}) passed is_main_process=False, so nobody would"
            " write. Leave it out (the first rank writes) or pass True on the rank that writes."
        )
    return writers[0]


def _write(call: Call, plan: Plan, transport: Transport, barrier: WriterBarrier) -> None:
    if plan.whole:
        (names,) = plan.files.values()
        _write_whole(call, transport.gather(names, barrier.proceed))
        return
    staging = call.stage()
    try:
        bar = logging.tqdm(plan.files.items(), desc="Writing model shards", disable=len(plan.files) < 2)
        for name, names in bar:
            save_file(transport.gather(names, barrier.proceed), staging.path / name, metadata={"format": "pt"})
        if len(plan.files) > 1:
            (staging.path / staging.index).write_text(plan.index(call.model), encoding="utf-8")
        call.native(staging, {})
    finally:
        staging.discard()


def _write_whole(call: Call, state: dict[str, Any]) -> None:
    staging = call.stage()
    try:
        call.native(staging, state)
    finally:
        staging.discard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is saved, and in which files; the same on every rank.

    Attributes:
        tensors: this rank's part of every entry, in the order of the state dict, every tied tensor once.
        files: the names of the entries by file name.
        size: of all entries, in bytes.
        whole: gather all entries at once and let transformers write them.
    """

    tensors: dict[str, Any]
    files: dict[str, list[str]]
    size: int
    whole: bool

    @classmethod
    def of(cls, model: nn.Module, call: Call) -> Self:
        """Plan a save of the model's state, or of the ``state_dict`` that the caller gave."""
        arguments = {**call.extra, **call.arguments}
        _refuse(model, arguments)
        state: dict[str, Any] = _merged(arguments["state_dict"] or model.state_dict(keep_vars=True))
        for key in getattr(model, "_keys_to_ignore_on_save", None) or ():
            state.pop(key, None)
        check_parts(state)
        aliases = _aliases(model, state)
        tensors = {name: value for name, value in state.items() if name not in aliases}
        if _needs_whole(model, tensors, arguments):
            return cls(tensors=tensors, files={"": list(tensors)}, size=0, whole=True)
        # What only changes places is written where transformers would write it.
        order = _reverted(model, _on_meta(tensors)) if arguments.get("save_original_format", True) else None
        return cls.of_files(call, {name: tensors[name] for name in order or tensors})

    @classmethod
    def of_files(cls, call: Call, tensors: Mapping[str, Tensor]) -> Self:
        """Plan a save of ``tensors``, which may be on meta, under the names that they have here."""
        split = split_torch_state_dict_into_shards(
            _on_meta(tensors),
            filename_pattern=call.names[0].replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size={**call.extra, **call.arguments}["max_shard_size"],
        )
        size = split.metadata["total_size"]
        return cls(tensors=dict(tensors), files=split.filename_to_tensors, size=size, whole=False)

    @property
    def digest(self) -> str:
        """What must be the same on every rank."""
        entries = [(n, tuple(t.shape), str(t.dtype)) for n, t in self.tensors.items() if isinstance(t, Tensor)]
        return hashlib.sha256(repr((entries, self.files, self.whole)).encode()).hexdigest()[:16]

    def index(self, model: Any) -> str:
        """The index of several files, as transformers writes it."""
        where = {name: file for file, names in self.files.items() for name in names}
        metadata = {"total_parameters": model.num_parameters(), "total_size": self.size}
        return json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _refuse(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    require(SAVING)
    _private.require("saving")
    if not arguments.get("safe_serialization", True):
        raise NotSupportedError("a sharded model is saved as safetensors; leave out safe_serialization=False")
    if arguments.get("distributed_checkpoint", False):
        raise NotSupportedError(
            "distributed_checkpoint=True is transformers' own parallelism; a sharded model is saved in that format by "
            "torch.distributed.checkpoint.save(model.state_dict(), ...)"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise NotSupportedError("a quantized model cannot be saved after sharding; save it before shard()")
    if arguments.get("save_original_format", True) and (how := _dequantized(model)) is not None:
        raise NotSupportedError(
            f"this {type(model).__name__} was made of a quantized checkpoint ({how}), and is not quantized any more. "
            "transformers would write quantized weights again, beside a config.json that does not say so, and read "
            "them as others. Nothing was written. Save the weights as they are: "
            "save_pretrained(folder, save_original_format=False)"
        )


def _dequantized(model: Any) -> str | None:
    """Return what has dequantized the weights as they were loaded, and would quantize them again; else None."""
    for conversion in getattr(model, "_weight_conversions", None) or ():
        for operation in getattr(conversion, "operations", ()):
            if "Dequantize" in type(operation).__name__ and not hasattr(model.config, "quantization_config"):
                return type(operation).__name__
    return None


def _aliases(model: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Return the names of tied tensors that transformers does not save; of each tensor one name is left."""
    patterns = [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()  # a list in transformers 4, a dict in 5
    ]
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    aliases: set[str] = set()
    for names in groups.values():
        declared = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in patterns)]
        aliases.update(declared[: len(names) - 1])
    return aliases


def _merged(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with one object for every tensor: detached, as in a state dict, tied names have one each."""
    seen: dict[Any, Any] = {}
    return {name: seen.setdefault(_identity(value), value) for name, value in state.items()}


def _identity(value: Any) -> Any:
    """Return what is the same for two tensors of one memory; of DTensors, for those of one part."""
    if not isinstance(value, DTensor):
        return id(value)
    local = local_tensor(value)
    return (local.data_ptr(), tuple(value.shape), value.dtype) if local.numel() and not local.is_meta else id(value)


def _on_meta(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}


def _needs_whole(model: Any, tensors: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Tell whether transformers has to see all entries at once."""
    distinct = len({id(tensor) for tensor in tensors.values()}) == len(tensors)
    if not distinct or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return True
    return getattr(model, "_hf_peft_config_loaded", False) or _converts(model, _on_meta(tensors), arguments)


def entries_saved(model: Any, meta: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Return the names under which transformers saves ``model``, each with the name of that tensor in the model.

    Args:
        model: the unsharded model, which may be on meta.
        meta: its state dict on meta, tied tensors as one object.

    Returns:
        None if an entry is computed from tensors of the model, not one of them.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {name: tensor for name, tensor in meta.items() if name not in ignored}
    aliases = _aliases(model, state)
    tensors = {name: tensor for name, tensor in state.items() if name not in aliases}
    saved = _reverted(model, tensors)
    names = {id(tensor): name for name, tensor in tensors.items()}
    if saved is None or len(names) < len(tensors) or any(id(tensor) not in names for tensor in saved.values()):
        return None
    return {name: names[id(tensor)] for name, tensor in saved.items()}


def _converts(model: Any, meta: dict[str, Tensor], arguments: Mapping[str, Any]) -> bool:
    """Tell whether transformers saves other entries than the model has (renamed, merged or split ones)."""
    if not arguments.get("save_original_format", True):
        return False
    reverted = _reverted(model, meta)
    return reverted is None or set(reverted) != set(meta) or any(reverted[name] is not t for name, t in meta.items())


def _reverted(model: Any, meta: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Return what transformers makes of a state dict when it saves; None if that cannot be known without values."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        if getattr(model, "_checkpoint_conversion_mapping", None):
            return None
        fixed: dict[str, Any] = model._fix_state_dict_keys_on_save(dict(meta))
        return fixed
    try:
        reverted: dict[str, Any] = revert_weight_conversion(model, dict(meta))
    except Exception:  # an operation that wants values
        return None
    return reverted
