"""Rewrite checkpoints of remote code for classes of transformers that compute the same under other names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
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
        source: a folder with a config.json and .safetensors files.
        target: a folder, which is made if it is missing.
        configuration: returns the configuration of the new class for what config.json holds.
        renamed: yields the tensors of the new class for those of a file, and that configuration.

    Raises:
        ConfigError: there are no such files; or what the two callables raise.
    """
    source, target = Path(source), Path(target)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{source} holds no .safetensors files; give the folder of a checkpoint that has them")
    made = configuration(json.loads((source / "config.json").read_text(encoding="utf-8")))
    target.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for file in files:
        with safe_open(file, "pt") as stored:
            names = list(stored.keys())
            state = dict(renamed({name: stored.get_tensor(name) for name in names}, made))
        save_file(state, target / file.name, {"format": "pt"})
        where |= dict.fromkeys(state, file.name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(where.items()))}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    made.save_pretrained(target)


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
