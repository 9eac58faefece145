"""Writing the weights of a training checkpoint as a standard one, by one process: no ranks, no accelerator.

What is written is what ``save_pretrained`` of the unsharded model would have written. The model is built on meta, which
says what its entries are called in files and which of them are tied; then each file is read, written and forgotten.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from shardcore._progress import Progress
from shardcore.checkpoint import Checkpoint
from shardcore.errors import CheckpointError, ConfigError, NotSupportedError
from shardcore_transformers._placing import Staging
from shardcore_transformers.models import meta_model

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    shown: bool = False,
) -> list[str]:
    """Write the model of ``checkpoint`` into ``folder``, over an earlier one at once; return the names of the files.

    Of the weights no more than one file is in memory. A model of transformers gets its configurations too; of any other
    there are weights alone, under the names of its state dict, of tied ones the first (the metadata of the file has the
    others, as ``safetensors.torch.load_model`` reads them).

    Args:
        checkpoint: whose model is written.
        folder: made if it is not there.
        dtype: of the floating-point weights; as they were saved if not given.
        max_shard_size: of one file, such as ``"500MB"``.
        shown: show a line of progress on a terminal.

    Raises:
        CheckpointError: the checkpoint is damaged, says nothing about its model, or its names are not those of the
            installed library.
        ConfigError: its configuration cannot be built, or ``max_shard_size`` is none.
        NotSupportedError: the library saves this model with entries that are computed from several of its own.
    """
    if re.fullmatch(r"\d+(KB|MB|GB|TB)", max_shard_size) is None:
        raise ConfigError(f"max_shard_size is {max_shard_size!r}; wanted a number and KB, MB, GB or TB, such as 500MB")
    about = checkpoint.index.get("about")
    if not isinstance(about, dict):
        raise CheckpointError(f"{checkpoint.path} says nothing about its model; save it with this release")
    reading = _Reading(checkpoint, dtype)
    if about.get("config") is None:
        return _export_plain(reading, folder, max_shard_size, shown=shown)
    return _export_native(reading, about, folder, max_shard_size, shown=shown)


class _Reading:
    """The weights of a checkpoint in the dtype that they are written in.

    Attributes:
        meta: every entry on meta, tied ones as one object.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
        self.checkpoint, self._dtype = checkpoint, dtype
        self.aliases = {
            name.removeprefix("model."): of.removeprefix("model.")
            for name, of in checkpoint.index.get("aliases", {}).items()
        }
        self.meta: dict[str, Tensor] = {}
        for name in checkpoint.names():
            if name not in self.aliases:
                size, saved = checkpoint.tensors[f"model.{name}"]
                self.meta[name] = torch.empty(size, dtype=self._of(saved), device="meta")
        self.meta |= {name: self.meta[of] for name, of in self.aliases.items()}

    def _of(self, saved: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and saved.is_floating_point else saved

    def read(self, names: Mapping[str, str], progress: Progress) -> dict[str, Tensor]:
        """Return tensors by the names of ``names``, which says what each is called in the checkpoint."""
        found = {}
        for name, key in names.items():
            whole = self.checkpoint.read(f"model.{key}")
            progress.advance(whole.nbytes)
            found[name] = whole.to(self._of(whole.dtype))
        return found

    def progress(self, names: Mapping[str, str], *, shown: bool) -> Progress:
        """Return a line for reading ``names``."""
        total = sum(self.checkpoint.bytes_of(f"model.{key}") for key in names.values())
        return Progress(total, f"converting {self.checkpoint.path.name}", shown=shown)


def _export_plain(reading: _Reading, folder: Path, max_shard_size: str, *, shown: bool) -> list[str]:
    names = {name: name for name in reading.meta if name not in reading.aliases}
    split = split_torch_state_dict_into_shards(
        {name: reading.meta[name] for name in names},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    staging = Staging.begin(folder, _WEIGHTS, _INDEX)
    try:
        _write(reading, split.filename_to_tensors, names, staging.path, shown=shown, aliases=reading.aliases)
        if len(split.filename_to_tensors) > 1:
            where = {name: file for file, own in split.filename_to_tensors.items() for name in own}
            index = {"metadata": {"total_size": split.metadata["total_size"]}, "weight_map": where}
            (staging.path / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        staging.place()
    finally:
        staging.discard()
    return sorted(path.name for path in folder.iterdir())


def _export_native(
    reading: _Reading, about: Mapping[str, Any], folder: Path, max_shard_size: str, *, shown: bool
) -> list[str]:
    from shardcore_transformers._native import Call
    from shardcore_transformers._saving import Plan, entries_saved

    model = _model_of(about, reading)
    call = Call.of(model, model.save_pretrained, folder, max_shard_size=max_shard_size)
    names = entries_saved(model, reading.meta)
    if names is None:
        raise NotSupportedError(
            f"transformers saves a {type(model).__name__} with entries that it computes from several tensors of the "
            "model. Load the checkpoint into the model and call save_pretrained; nothing was written."
        )
    plan = Plan.of_files(call, {name: reading.meta[key] for name, key in names.items()})
    staging = call.stage()
    try:
        _write(reading, plan.files, names, staging.path, shown=shown)
        if len(plan.files) > 1:
            (staging.path / staging.index).write_text(plan.index(model), encoding="utf-8")
        call.native(staging, {})
    finally:
        staging.discard()
    return sorted(path.name for path in folder.iterdir())


def _write(
    reading: _Reading,
    files: Mapping[str, list[str]],
    names: Mapping[str, str],
    folder: Path,
    *,
    shown: bool,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write each file of ``files``; the metadata of one has the ``aliases`` of its tensors."""
    with reading.progress(names, shown=shown) as progress:
        for file, own in files.items():
            further = {alias: of for alias, of in (aliases or {}).items() if of in own}
            tensors = reading.read({name: names[name] for name in own}, progress)
            save_file(tensors, folder / file, metadata={"format": "pt", **further})
            del tensors  # before the next are read


def _model_of(about: Mapping[str, Any], reading: _Reading) -> Any:
    """Build the model on meta, with the dtypes of what was saved.

    Raises:
        CheckpointError: its names or shapes are others than those that were saved.
    """
    name = str(about["class"]).rpartition(".")[2]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps({**about["config"], "architectures": [name]}))
        model: Any = meta_model(place)
    if about.get("generation_config") is not None and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_dict(about["generation_config"])
    _take_dtypes(model, reading, about)
    return model


def _take_dtypes(model: nn.Module, reading: _Reading, about: Mapping[str, Any]) -> None:
    built = model.state_dict(keep_vars=True)
    differing = {n for n in built.keys() & reading.meta.keys() if built[n].shape != reading.meta[n].shape}
    if differing or built.keys() != reading.meta.keys():
        shown = ", ".join(sorted(differing | (built.keys() ^ reading.meta.keys()))[:3])
        versions = ", ".join(f"{name} {version}" for name, version in about["libraries"].items())
        raise CheckpointError(
            f"{about['class']} as it is installed has other names or shapes than the checkpoint: {shown}. Nothing was "
            f"written. Convert it with what it was saved with: {versions}"
        )
    for name, tensor in built.items():
        tensor.data = torch.empty_like(reading.meta[name])
