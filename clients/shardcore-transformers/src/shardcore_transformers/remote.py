"""Classes of remote code: files of Python that lie beside a checkpoint, and that the user trusts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # it is not in its __all__
from transformers import dynamic_module_utils
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from shardcore.errors import ConfigError

# Seconds in which another process copies a few files of code.
_LONGEST = 300.0


@contextmanager
def copying_code() -> Iterator[None]:
    """Let no other process of this machine copy code to transformers' cache, of which it would read a part.

    Raises:
        Timeout: another process has done so for five minutes.
    """
    dynamic_module_utils.init_hf_modules()
    with WeakFileLock(Path(dynamic_module_utils.HF_MODULES_CACHE) / ".shardcore.lock", timeout=_LONGEST):
        yield


def remote_class(reference: str, folder: str | os.PathLike[str]) -> Any:
    """Import a class from the code in a folder; its module is ``transformers_modules.FOLDER.HASH.MODULE``.

    transformers copies the code to its cache, and imports it there.

    Args:
        reference: ``module.Class``, as ``auto_map`` of a config.json has it; after ``owner/name--`` of the hub, if the
            code lies there.
        folder: where the code lies otherwise.

    Raises:
        ConfigError: there is no such code, or it raises.
    """
    with copying_code():
        try:
            return dynamic_module_utils.get_class_from_dynamic_module(reference, os.fspath(folder))
        except Exception as error:
            first = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{reference} of the code in {folder} cannot be imported: {type(error).__name__}: {first}. Correct "
                "auto_map of its config.json, or install what the code needs"
            ) from error


def remote_model_of(auto: Any, config: Any, folder: str) -> Any:
    """Return the class of remote code that an Auto class takes for ``config``; None if there is none, or no Auto class.

    Errors are those of `remote_class`.
    """
    reference = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if reference is None or not hasattr(auto, "_model_mapping"):
        return None
    found = remote_class(reference, folder)
    found.register_for_auto_class(auto.__name__)  # so that save_pretrained writes the code too
    return add_generation_mixin_to_remote_model(found)
