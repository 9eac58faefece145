"""`ShardConfig` as Shardformer's users write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import shardcore
from shardcore.config import shard_config
from shardcore.config.shard_config import Switch
from shardcore.errors import ConfigError, NotSupportedError

__all__ = ["ShardConfig"]


def _same(value: Any) -> Any:
    return value


def _opposite(value: Any) -> Any:
    return not value if isinstance(value, bool) else value


# Second name -> (field, how one value follows from the other).
_SECOND_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "gather_output": ("parallel_output", _opposite),
    "use_flash_attention": ("enable_flash_attention", _same),
}
# Field that is not there -> (its values that ask for nothing, what to do instead).
_NOT_THERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_mode": (("1d",), "use '1d'"),
    "enable_sequence_overlap": ((False,), "leave it False"),
    "fp8_communication": ((False,), "leave it False"),
    "make_vocab_size_divisible_by": ((None,), "leave it None: a vocabulary of any size is split unevenly"),
}


class ShardConfig(shard_config.ShardConfig):
    """`shardcore.ShardConfig` by Shardformer's names too: ``gather_output`` and ``use_flash_attention``.

    Fields of Shardformer's that shardcore lacks are accepted with the values that ask for nothing.

    Raises:
        ConfigError: one setting is given two values by its two names.
        NotSupportedError: a field that shardcore lacks asks for something; says what to do instead.
    """

    __slots__ = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**_first_names(fields))

    @property
    def gather_output(self) -> bool:
        """Another name for ``not parallel_output``."""
        return not self.parallel_output

    @property
    def use_flash_attention(self) -> Switch:
        """Another name for ``enable_flash_attention``."""
        return self.enable_flash_attention


def _first_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` by the names that shardcore has; None under a second name leaves the field alone."""
    first = {name: value for name, value in fields.items() if name not in {*_SECOND_NAMES, *_NOT_THERE}}
    for name, (nothing, instead) in _NOT_THERE.items():
        if name in fields and fields[name] not in nothing:
            version = shardcore.__version__
            raise NotSupportedError(f"ShardConfig.{name}={fields[name]!r} is not in shardcore {version}; {instead}")
    for name, (target, other) in _SECOND_NAMES.items():
        if (value := fields.get(name)) is None:
            continue
        if target in first and first[target] is not None and first[target] != other(value):
            raise ConfigError(
                f"ShardConfig.{name}={value!r} contradicts {target}={first[target]!r}: they are one setting; give one"
            )
        first[target] = other(value)
    return first
