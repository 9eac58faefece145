"""`from_pretrained`: a checkpoint of transformers becomes a sharded model that was never there as a whole.

The native ``from_pretrained`` does everything that it knows (renamed and merged keys, prefixes, ties, dtypes, reports,
what is missing) on tensors without values, which remember what was to be done with which tensors of which files
(`shardcore.weights`). The model that it returns is sharded without values; each rank then reads its parts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from shardcore.api import failing_together, shard
from shardcore.apply.launch import start_process_group
from shardcore.config import ShardConfig
from shardcore.config.shard_config import SHORT_NAMES
from shardcore.errors import ConfigError, ShardcoreWarning
from shardcore.fsdp.phase import Wrap
from shardcore.inferred import Inference
from shardcore.policy import Policy
from shardcore.weights.files import Files, indexed
from shardcore.weights.lazy import LazyTensor, recording
from shardcore.weights.materialize import to_meta
from shardcore.weights.recipes import constant
from shardcore.weights.weights import Weights
from shardcore_transformers import _private
from shardcore_transformers.quantizing import quantize_empty, quantizer_of, refuse_packed_files
from shardcore_transformers.remote import copying_code, remote_model_of

#: Options of the native ``from_pretrained`` that say where files are.
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")

#: What describes an adapter of PEFT.
_ADAPTER = "adapter_config.json"

#: Options that contradict what is done here, and what to do instead.
_REFUSED = {
    "device_map": "the mesh says where parameters are; leave it out",
    "max_memory": "the mesh says where parameters are; leave it out",
    "offload_folder": "each rank reads its own part only; leave it out",
    "offload_state_dict": "each rank reads its own part only; leave it out",
    "offload_buffers": "each rank reads its own part only; leave it out",
    "low_cpu_mem_usage": "each rank reads its own part only; leave it out",
    "tp_plan": "the policy of the model's pack says how it is split; give tp=",
    "tp_size": "give tp=",
    "device_mesh": "give config=shardcore.ShardConfig(device_mesh=...) as shard_config=",
    "distributed_config": "give tp=, dp= and other fields of shardcore.ShardConfig",
    "gguf_file": "weights are read from safetensors files; convert the checkpoint first",
    "from_tf": "weights are read from safetensors files; convert the checkpoint first",
    "from_flax": "weights are read from safetensors files; convert the checkpoint first",
    "state_dict": "weights are read from files; give their folder, or use shardcore.shard(model)",
    "adapter_kwargs": "load the adapter after the model",
    "mirror": "it has no effect in transformers; leave it out",
}

#: Fields of the configuration by all of their names.
_FIELDS = {field.name for field in fields(ShardConfig)} | SHORT_NAMES.keys()


def from_pretrained(
    model_class: type[Any] | str,
    path: str | os.PathLike[str],
    *model_args: Any,
    shard_config: ShardConfig | None = None,
    policy: Policy | type[Policy] | Mapping[str, Any] | Literal["infer"] | None = None,
    infer: Inference = "proved",
    wrap: Wrap = True,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Do what `shardcore.from_pretrained` says."""
    sharding = {name: options.pop(name) for name in [*options] if name in _FIELDS}
    with failing_together(shard_config, sharding):
        start_process_group(ShardConfig.of(shard_config, **sharding))  # one rank speaks for all from here on
        wants_info = bool(options.pop("output_loading_info", False))
        quantizer = quantizer_of(options.pop("quantization_config", None))
        model, weights, info = load_empty(model_class, path, *model_args, seed=seed, **options)
        if quantizer is not None:
            quantize_empty(model, quantizer)
    model = shard(model, shard_config, policy=policy, infer=infer, wrap=wrap, weights=weights, **sharding)
    return (model, info) if wants_info else model


@contextmanager
def _setting(name: str, value: str) -> Iterator[None]:
    """Give a variable of the environment this value in here; what it was comes back."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def load_empty(
    model_class: type[Any] | str, path: str | os.PathLike[str], *model_args: Any, seed: int = 0, **options: Any
) -> tuple[Any, Weights, Any]:
    """Return a model without values, what they are made from, and what transformers says of the keys.

    Args and errors are those of `shardcore.from_pretrained`.
    """
    _private.require("loading")
    _refuse(options)
    skeleton = _Skeleton(model_class, path, model_args, options)
    model, info = skeleton.load(seed)
    return model, Weights(to_meta(model), skeleton.files), info


def _refuse(options: Mapping[str, Any]) -> None:
    for name, todo in _REFUSED.items():
        if options.get(name) not in (None, False):
            raise ConfigError(f"shardcore.from_pretrained: {name}={options[name]!r} makes no sense here: {todo}")


class _Skeleton:
    """A model that the native ``from_pretrained`` loads without values."""

    def __init__(
        self, model_class: Any, path: str | os.PathLike[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        for name in _REFUSED:
            options.pop(name, None)
        self.place = os.fspath(path)
        self._args, self._options = args, options
        self._subfolder: str = options.pop("subfolder", None) or ""
        self._variant: str | None = options.pop("variant", None)
        self._safe: bool | None = options.pop("use_safetensors", None)
        if options.pop("weights_only", True) is not True:
            raise ConfigError("shardcore.from_pretrained: weights_only=False would run code of the checkpoint")
        self._trusts = bool(options.pop("trust_remote_code", None))
        hub = {name: options.pop(name) for name in _HUB if name in options}
        self._attributes = {name: value for name, value in options.items() if name not in _NOT_OF_CONFIG}
        self.folder = _folder(self.place, hub, pickled=self._safe is False, code=self._trusts)
        given = _named(model_class)
        _look_for_adapter(Path(self.folder) / self._subfolder, self.place, given.__name__)
        with copying_code() if self._trusts else nullcontext():
            self.config = self._configuration(getattr(given, "config_class", None) or transformers.AutoConfig)
        refuse_packed_files(self.config, self.place)
        remote = remote_model_of(given, self.config, self.folder) if self._trusts else None
        self.cls = remote or _chosen(given, self.config)
        self.files: Files | None = None

    def _configuration(self, config_class: Any) -> Any:
        given = self._attributes.pop("config", None)
        self._options.pop("config", None)
        if isinstance(given, PretrainedConfig):
            return given
        where = self.folder if given is None else given
        # Not told, it would ask on the terminal.
        trusts = {"trust_remote_code": self._trusts} if config_class is transformers.AutoConfig else {}
        try:
            config, unused = config_class.from_pretrained(
                where, return_unused_kwargs=True, subfolder=self._subfolder, **trusts, **self._attributes
            )
        except Exception as error:
            first = " ".join(str(error).split())[:300]
            if trusts and "trust_remote_code" in str(error):
                first = "it needs code of its own (auto_map). If you trust it, pass trust_remote_code=True"
            raise ConfigError(
                f"transformers cannot read the configuration of {self.place}: {type(error).__name__}: {first}"
            ) from error
        self._options = {k: v for k, v in self._options.items() if k in _NOT_OF_CONFIG or k in unused}
        return config

    def load(self, seed: int) -> tuple[nn.Module, Any]:
        """Return the model with lazy parameters, and what transformers says of the keys."""
        state = self._state()
        # Handing tensors without values to threads takes longer than the threads' work.
        with _quiet_but_once(self.place), _setting("HF_DEACTIVATE_ASYNC_LOAD", "1"), recording(seed):
            try:
                model, info = self.cls.from_pretrained(
                    None, *self._args, config=self.config, state_dict=state, output_loading_info=True, **self._options
                )
            except Exception as error:
                what = f"{self.place} into a {self.cls.__name__}"
                raise ConfigError(f"transformers could not load {what}: {type(error).__name__}: {error}") from error
        model.config.name_or_path = self.place
        model.name_or_path = self.place
        if model.can_generate():
            self._load_generation_config(model)
        return model, info

    def _load_generation_config(self, model: Any) -> None:
        """Do what the native call does with the path that it is not given here."""
        if "generation_config" in self._options:
            return
        where: dict[str, Any] = {"subfolder": self._subfolder, **self._attributes}
        try:
            found = GenerationConfig.from_pretrained(self.folder, **where)
        except OSError:
            found = GenerationConfig.from_pretrained(
                self.folder, config_file_name="config.json", _from_model_config=True, **where
            )
        model.generation_config = found

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint, without values."""
        folder = Path(self.folder) / self._subfolder
        if self._safe is False:
            return _pickled(folder, self._variant)
        self.files = Files.at(folder, variant=self._variant)
        return {key: LazyTensor.of(self.files.source(key)) for key in self.files.tensors}


#: Options of the native ``from_pretrained`` that configurations must not see.
_NOT_OF_CONFIG = frozenset(
    {
        "dtype",
        "torch_dtype",
        "attn_implementation",
        "key_mapping",
        "ignore_mismatched_sizes",
        "generation_config",
        "use_kernels",
        "kernel_config",
        "experts_implementation",
    }
)


def _folder(place: str, hub: dict[str, Any], *, pickled: bool, code: bool) -> str:
    """Return the folder of a checkpoint; what the hub has is downloaded to the cache."""
    if Path(place).is_dir():
        return place
    if Path(place).exists() or place.count("/") > 1 or place.startswith((".", "/", "~")):
        raise ConfigError(f"{place} is no folder; give a folder with a config.json and .safetensors files")
    patterns = ["*.json", "*.bin" if pickled else "*.safetensors", *(["*.py"] if code else [])]
    hub.pop("proxies", None)
    try:
        return str(snapshot_download(place, allow_patterns=patterns, **hub))
    except Exception as error:
        raise ConfigError(
            f"{place} is neither a folder nor a model that could be downloaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


def _look_for_adapter(folder: Path, place: str, name: str) -> None:
    """Say that ``folder`` has an adapter, which transformers loads with its model and which is not loaded here.

    Raises:
        ConfigError: it has no model beside it.
    """
    file = folder / _ADAPTER
    if not file.is_file() or importlib.util.find_spec("peft") is None:
        return
    then = f"shardcore_peft.from_pretrained(model, {place!r})"
    if (folder / "config.json").is_file():
        said = f"{place} holds an adapter of PEFT beside the model, which was loaded without it. To have it too: {then}"
        warnings.warn(said, ShardcoreWarning, stacklevel=6)
        return
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"] or "BASE"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    raise ConfigError(
        f"{place} holds an adapter of PEFT, not a model. Load its model first: model = shardcore.from_pretrained("
        f"{name}, {base!r}, ...), and then model = {then}"
    )


def _named(given: Any) -> Any:
    """Return the class that the user named, or gave.

    Raises:
        ConfigError: it is no class of a model of transformers, and no Auto class.
    """
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            given = getattr(importlib.import_module(module or "transformers"), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"no class {name!r} in {module or 'transformers'} ({error}); give a class of transformers, an Auto "
                "class, or package.module.Class"
            ) from error
    if not hasattr(given, "_model_mapping") and not (isinstance(given, type) and issubclass(given, PreTrainedModel)):
        raise ConfigError(
            f"shardcore.from_pretrained wants a model class of transformers, an Auto class or a name, got {given!r}; "
            "other models: shardcore.shard(model, weights=...)"
        )
    return given


def _chosen(given: Any, config: Any) -> Any:
    """Return the class of the model: the one given, or that which an Auto class chooses for ``config``."""
    if not hasattr(given, "_model_mapping"):
        return given
    try:
        return _private.model_of_auto_class(given, config)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{given.__name__} has no model for a {type(config).__name__}: {error}") from error


def _pickled(folder: Path, variant: str | None) -> dict[str, Tensor]:
    """Return the tensors of pickled files, mapped and not read yet."""
    files = [file for file, _ in indexed(folder, "pytorch_model.bin", "pytorch_model.bin.index.json", variant)]
    if not files:
        of = f" of the variant {variant}" if variant else ""
        raise ConfigError(
            f"{folder} holds no pytorch_model.bin and no index of such files{of}, which use_safetensors=False asks for"
        )
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ConfigError(f"{file} cannot be read with weights_only: {type(error).__name__}: {error}") from error
        for key, tensor in loaded.items():
            state[key] = LazyTensor.of(constant(tensor))
    return state


@contextmanager
def _quiet_but_once(place: str) -> Iterator[None]:
    """Let transformers report on one rank, under the name of the checkpoint, and draw no bar of its own."""
    loud = not dist.is_initialized() or dist.get_rank() == 0
    utils = transformers.utils.logging
    level, bars = utils.get_verbosity(), utils.is_progress_bar_enabled()
    named = _Named(place)
    library = logging.getLogger("transformers")
    loggers = [logging.getLogger(name) for name in library.manager.loggerDict if name.startswith("transformers.")]
    try:
        if not loud:
            utils.set_verbosity_error()
        utils.disable_progress_bar()
        for logger in loggers:
            logger.addFilter(named)
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(named)
        utils.set_verbosity(level)
        if bars:
            utils.enable_progress_bar()


class _Named(logging.Filter):
    """Puts the name of a checkpoint where transformers says ``None``, as it is given tensors instead of a path."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the message, and let it pass."""
        if isinstance(record.msg, str):
            record.msg = record.msg.replace("checkpoint at None", f"checkpoint at {self.place}").replace(
                "from: None", f"from: {self.place}"
            )
        return True
