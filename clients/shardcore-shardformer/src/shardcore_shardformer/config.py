"""`ShardConfig` as Shardformer's users write it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, get_args

import shardcore
from shardcore.config import shard_config
from shardcore.config.shard_config import Switch
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import axis_name
from shardcore.mesh.context import ContextMode
from shardcore_shardformer.stage_manager import PipelineStageManager


def _same(value: Any) -> Any:
    return value


def _opposite(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


def _one_if_off(value: Any) -> int | None:
    if not isinstance(value, bool):
        raise ConfigError(f"ShardConfig.enable_tensor_parallelism must be True or False, got {value!r}")
    return None if value else 1


def _managed(value: Any) -> PipelineStageManager:
    if not isinstance(value, PipelineStageManager):
        raise ConfigError(f"ShardConfig.pipeline_stage_manager must be a PipelineStageManager or None, got {value!r}")
    return value


#: Modes of sequence parallelism by which ranks of their own divide the tokens: context parallelism here.
CONTEXT_MODES = tuple(mode for mode in get_args(ContextMode) if mode != "auto")
# (Second name, field, how its value follows from that of the second name: None leaves it alone.)
_SECOND_NAMES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("gather_output", "parallel_output", _opposite),
    ("use_flash_attention", "enable_flash_attention", _same),
    ("enable_tensor_parallelism", "tensor_parallel_size", _one_if_off),
    ("pipeline_stage_manager", "device_mesh", lambda manager: _managed(manager).device_mesh),
    ("pipeline_stage_manager", "pipeline_bounds", lambda manager: _managed(manager).bounds),
)
# Field that is not there -> (its values that ask for nothing, what to do instead).
_NOT_THERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_mode": (("1d",), "use '1d'"),
    "make_vocab_size_divisible_by": ((None,), "leave it None: a vocabulary of any size is split unevenly"),
    "sequence_parallelism_mode": (
        (None, "split_gather", *CONTEXT_MODES),
        f"use 'split_gather', or one of {', '.join(CONTEXT_MODES)}, which divide the tokens inside attention too",
    ),
}


class ShardConfig(shard_config.ShardConfig):
    """`shardcore.ShardConfig` by Shardformer's names too.

    These are ``gather_output``, ``use_flash_attention``, ``enable_tensor_parallelism`` and ``pipeline_stage_manager``.
    Fields of Shardformer's that shardcore lacks are accepted with the values that ask for nothing.

    Raises:
        ConfigError: one setting is given two values by its two names.
        NotSupportedError: a field that shardcore lacks asks for something; says what to do instead.
    """

    __slots__ = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**first_names(fields))

    @property
    def gather_output(self) -> bool:
        """Another name for ``not parallel_output``."""
        return not self.parallel_output

    @property
    def use_flash_attention(self) -> Switch | str:
        """Another name for ``enable_flash_attention``."""
        return self.enable_flash_attention

    @property
    def enable_tensor_parallelism(self) -> bool:
        """False says the same as ``tensor_parallel_size=1``."""
        return self.tensor_parallel_size != 1

    @property
    def pipeline_stage_manager(self) -> PipelineStageManager | None:
        """Where this rank is on the axis ``pp`` of ``device_mesh``; None where it has none."""
        mesh, bounds = self.device_mesh, self.pipeline_bounds
        if mesh is None or axis_name(mesh, "pp") is None:
            return None
        return PipelineStageManager(mesh, bounds and [end - begin for begin, end in itertools.pairwise(bounds)])


def first_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` by the names that shardcore has; None under a second name leaves the field alone.

    Raises:
        ConfigError: one setting is given two values by its two names.
        NotSupportedError: a field that shardcore lacks asks for something; says what to do instead.
    """
    second = {name for name, _, _ in _SECOND_NAMES}
    first = {name: value for name, value in fields.items() if name not in {*second, *_NOT_THERE}}
    for name, (nothing, instead) in _NOT_THERE.items():
        if name in fields and fields[name] not in nothing:
            version = shardcore.__version__
            raise NotSupportedError(f"ShardConfig.{name}={fields[name]!r} is not in shardcore {version}; {instead}")
    mode = fields.get("sequence_parallelism_mode")
    if mode is not None and not fields.get("enable_sequence_parallelism"):
        raise ConfigError(
            f"ShardConfig.sequence_parallelism_mode={mode!r} without enable_sequence_parallelism=True says nothing; "
            "give both or neither"
        )
    if mode in CONTEXT_MODES:
        if not fields.get("context_parallel_size"):
            raise ConfigError(
                f"sequence_parallelism_mode={mode!r} needs the number of ranks that divide each sequence: "
                "HybridParallelPlugin(sp_size=), or ShardConfig(context_parallel_size=)"
            )
        first |= {"context_parallel_mode": mode, "enable_sequence_parallelism": False}
    for name, target, other in _SECOND_NAMES:
        if (value := fields.get(name)) is None or (meant := other(value)) is None:
            continue
        if target in first and first[target] is not None and first[target] != meant:
            raise ConfigError(
                f"ShardConfig.{name}={value!r} contradicts {target}={first[target]!r}: they are one setting; give one"
            )
        first[target] = meant
    return first
