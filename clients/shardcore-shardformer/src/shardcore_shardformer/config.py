"""`ShardConfig` as Shardformer's users write it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    "make_vocab_size_divisible_by": ((None,), "leave it None: a vocabulary of any size is split unevenly"),
    "sequence_parallelism_mode": (
        (None, "split_gather", *CONTEXT_MODES),
        f"use 'split_gather', or one of {', '.join(CONTEXT_MODES)}, which divide the tokens inside attention too",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class ShardConfig(shard_config.ShardConfig):
    """`shardcore.ShardConfig` by Shardformer's names too.

    These are ``gather_output``, ``use_flash_attention``, ``enable_tensor_parallelism`` and ``pipeline_stage_manager``.
    Fields of Shardformer's that shardcore lacks are accepted with the values that ask for nothing.

    Attributes:
        tensor_parallel_mode: ``"1d"``: ranks divide weights along one dim, by Megatron's scheme. ``"2d"``: all ranks
            (4, 9, 16, ...) are a square, and divide weights and activations along two; for `ShardFormer`.

    Raises:
        ConfigError: one setting is given two values by its two names, or a square has another number of ranks.
        NotSupportedError: a field that shardcore lacks asks for something; says what to do instead.
    """

    tensor_parallel_mode: str = "1d"

    def __init__(self, *, tensor_parallel_mode: str = "1d", **fields: Any) -> None:
        object.__setattr__(self, "tensor_parallel_mode", tensor_parallel_mode)
        # Without arguments super() would be that of the class before it got its slots.
        super(ShardConfig, self).__init__(**first_names(fields))
        _check_mode(self)

    def resolve(self, world_size: int) -> shard_config.ShardConfig:
        """Return the configuration, for `shardcore.shard`, with all filled in for ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not multiply to ``world_size``.
            NotSupportedError: it is `ShardFormer` that divides models over a square.
        """
        if self.tensor_parallel_mode == "2d":
            raise NotSupportedError(
                "tensor_parallel_mode='2d' is not for shardcore.shard, nor for Booster: "
                "ShardFormer(shard_config).shard_model(model) divides a model over a square of ranks"
            )
        return super(ShardConfig, self).resolve(world_size)

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


#: Fields that say something of a square too.
_OF_A_SQUARE = ("check_inputs_every", "parallel_output", "tensor_parallel_mode", "tensor_parallel_size")


def _check_mode(config: ShardConfig) -> None:
    mode, version = config.tensor_parallel_mode, shardcore.__version__
    if mode in ("2.5d", "3d"):
        raise NotSupportedError(
            f"ShardConfig.tensor_parallel_mode={mode!r} is not in shardcore {version}: nobody gains by it below "
            "hundreds of ranks. For a product of n x n matrices each of p ranks sends 2 n^2 / p^(1/2) values in a "
            "square and 3 n^2 / p^(2/3) in a cube: a gain of 2/3 p^(1/6), which is none on 8 ranks and twofold on 729; "
            "and two of a cube's three exchanges leave a host of 8 cards, one of a square's two. '2.5d' lies between "
            "them, and has each weight several times. Use '2d' on 4 ranks, or '1d' beside data and pipeline parallelism"
        )
    if mode not in ("1d", "2d"):
        raise ConfigError(f"ShardConfig.tensor_parallel_mode must be '1d' or '2d', got {mode!r}")
    if mode == "1d":
        return
    for entry in dataclasses.fields(config):
        name, value = entry.name, getattr(config, entry.name)
        nothing = value is None or (name.endswith("_size") and value == 1) or value in (entry.default, {})
        if name not in _OF_A_SQUARE and not nothing:
            raise NotSupportedError(
                f"ShardConfig.{name}={value!r} together with tensor_parallel_mode='2d' is not supported by shardcore "
                f"{version}; leave it out, or use '1d'"
            )
    if config.tensor_parallel_size is not None:
        square_root(config.tensor_parallel_size)


def square_root(ranks: int) -> int:
    """Return how many rows, and columns, a square of so many ranks has.

    Raises:
        ConfigError: there is none.
    """
    if (root := math.isqrt(ranks)) ** 2 != ranks or root == 1:
        raise ConfigError(f"tensor_parallel_mode='2d' wants a square of ranks, 4, 9 or 16, got {ranks}; or use '1d'")
    return root


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
