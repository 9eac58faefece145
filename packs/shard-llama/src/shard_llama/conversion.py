"""Rewrite checkpoints of remote code for classes of transformers that compute the same under other names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardcore.errors import ConfigError


def rewrite(
    source: str | Path,
    target: str | Path,
    configuration: Callable[[Mapping[str, Any]], Any],
    renamed: Callable[[Mapping[str, Tensor], Any], Iterable[tuple[str, Tensor]]],
) -> None:
    """Write the checkpoint in the folder ``source`` to ``target`` under other names, file by file: one is in memory.

    The tokenizer's files are not copied.

    Args:
        source: a folder with a config.json and .safetensors files, or else pytorch_model*.bin, of which no code runs.
        target: a folder, which is made if it is missing.
        configuration: returns the configuration of the new class for what config.json holds.
        renamed: yields the tensors of the new class for those of a file, and that configuration.

    Raises:
        ConfigError: there are no such files; or what the two callables raise.
    """
    source, target = Path(source), Path(target)
    files = sorted(source.glob("*.safetensors")) or sorted(source.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(f"{source} holds no .safetensors and no pytorch_model*.bin; give the folder of a checkpoint")
    made = configuration(json.loads((source / "config.json").read_text(encoding="utf-8")))
    target.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for file in files:
        name = file.name if file.suffix == ".safetensors" else f"{file.stem.removeprefix('pytorch_')}.safetensors"
        state = dict(renamed(_tensors(file), made))
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, target / name, {"format": "pt"})
        where |= dict.fromkeys(state, name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(where.items()))}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    made.save_pretrained(target)


def _tensors(file: Path) -> Mapping[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)  # type: ignore[no-any-return]  # as saved


def require(config: Mapping[str, Any], only: Mapping[str, Any], old: str, new: str) -> None:
    """Refuse a config.json of an ``old`` model with options that a ``new`` one has not; ``only``: the values it knows.

    Raises:
        ConfigError: it has another value.
    """
    for name, known in only.items():
        if config.get(name, known) != known:
            raise ConfigError(
                f"a {old} with {name}={config[name]!r} cannot be a {new}, which knows {known!r} alone; load it with "
                "its own code: shardcore.from_pretrained(..., trust_remote_code=True)"
            )
