"""Letting transformers' own ``save_pretrained`` write what is not a sharded model's weights, on one rank alone."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from shardcore.errors import NotSupportedError
from shardcore.nn.mixin import native_class
from shardcore_transformers._placing import Staging


@dataclass(frozen=True, slots=True)
class Call:
    """One call of transformers' own ``save_pretrained``, whatever its arguments are called in this release."""

    model: nn.Module
    function: Callable[..., None]
    arguments: dict[str, Any]
    extra: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, native: Callable[..., None], *args: Any, **kwargs: Any) -> Call:
        """Take the call apart; ``native`` is the method, bound to ``model``."""
        bound = inspect.signature(PreTrainedModel.save_pretrained).bind(model, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        del arguments["self"]
        arguments["save_directory"] = os.fspath(arguments["save_directory"])
        return cls(model, native, arguments, arguments.pop("kwargs"))

    @property
    def names(self) -> tuple[str, str]:
        """The name of the weights' file where there is only one, and that of the index where there are several."""
        variant = f".{self.arguments['variant']}" if self.arguments["variant"] else ""
        stems = ((*name.rpartition("."),) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        weights, index = (f"{stem}{variant}.{suffix}" for stem, _, suffix in stems)
        return weights, index

    def stage(self) -> Staging:
        """Make room for the files of this call."""
        return Staging.begin(Path(self.arguments["save_directory"]), *self.names)

    def native(self, staging: Staging, state_dict: dict[str, Any]) -> None:
        """Let transformers save on this rank, alone, into ``staging``, and place all that is there before any upload.

        Without tensors in ``state_dict`` it writes everything but weights.

        Raises:
            NotSupportedError: this release of transformers wrote nothing.
        """
        arguments = {**self.arguments, **self.extra, "state_dict": state_dict, "is_main_process": True}
        arguments["save_directory"] = str(staging.rest)
        if arguments["push_to_hub"]:
            arguments.setdefault("repo_id", self.arguments["save_directory"].split(os.path.sep)[-1])
        with _alone(self.model, staging), contextlib.nullcontext() if state_dict else _silence():
            self.function(**arguments)
        if staging.rest.exists() and not any(staging.rest.iterdir()):
            raise NotSupportedError(
                f"transformers {transformers.__version__} wrote no configuration on this rank, so nothing was saved; "
                "install a release of the range that shardcore was tested with (shardcore doctor)"
            )
        staging.place()


@contextmanager
def _silence() -> Iterator[None]:
    """Show no progress of weights, of which transformers has none to write."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _alone(model: Any, staging: Staging) -> Iterator[None]:
    """Make ``model`` one that transformers saves on this rank without a collective.

    What it would gather or wait for follows from ``config.distributed_config`` and ``_tp_size``, which others set.
    """
    own, settings = type(model), vars(model.config)
    distributed = {"distributed_config": settings.pop("distributed_config")} if "distributed_config" in settings else {}
    model.__class__ = _stand_in(own, staging)
    try:
        yield
    finally:
        model.__class__ = own
        settings.update(distributed)


def _stand_in(own: type[nn.Module], staging: Staging) -> type[nn.Module]:
    """Return the class that the model has while transformers saves it.

    Its name is the upstream one, which goes into config.json, also where FSDP2 has put a prefix before it. transformers
    5 writes on global rank 0 only; here the writer is known.
    """
    base: Any = next(c for c in own.__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, FSDPModule))

    def upload(self: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        staging.place()
        return base._upload_modified_files(self, str(staging.folder), *args, **kwargs)

    def timestamps(self: Any, working_dir: Any) -> Any:
        return base._get_files_timestamps(self, str(staging.folder))

    upstream = native_class(base)
    names = {name: getattr(upstream, name) for name in ("__module__", "__qualname__", "__doc__")}
    hooks = {
        "should_save_on_this_rank": lambda self, is_main_process: is_main_process,
        "_get_files_timestamps": timestamps,
        "_upload_modified_files": upload,
        "_tp_size": property(lambda self: None),
    }
    return type(upstream.__name__, (base,), {**names, **hooks})
