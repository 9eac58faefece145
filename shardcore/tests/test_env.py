from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import shardcore
from shardcore import _env
from shardcore.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = [name for name in os.environ if name.startswith("SLURM_")]
    for variable in (*TORCHRUN, *slurm, "SHARDCORE_PACKS", "SHARDCORE_DISABLE_PACKS", "SHARDCORE_STRICT"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", set()),
        (" , ", set()),
        ("llama", {"llama"}),
        (" llama , shard-bert:bert,", {"llama", "shard-bert:bert"}),
    ],
)
def test_packs(monkeypatch: pytest.MonkeyPatch, value: str | None, names: set[str] | None) -> None:
    if value is not None:
        monkeypatch.setenv("SHARDCORE_PACKS", value)
        monkeypatch.setenv("SHARDCORE_DISABLE_PACKS", value)
    assert _env.packs() == names
    assert _env.disabled_packs() == (names or set())


@pytest.mark.parametrize(("value", "strict"), [(None, False), ("0", False), ("1", True)])
def test_strict(monkeypatch: pytest.MonkeyPatch, value: str | None, strict: bool) -> None:
    if value is not None:
        monkeypatch.setenv("SHARDCORE_STRICT", value)
    assert _env.strict() is strict


@pytest.mark.parametrize("value", ["true", "", "2", " 1"])
def test_strict_lists_the_valid_values(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SHARDCORE_STRICT", value)
    with pytest.raises(ConfigError) as caught:
        _env.strict()
    assert str(caught.value) == f"SHARDCORE_STRICT is {value!r}; valid values: '0', '1', or unset (which means '0')"


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in zip(TORCHRUN, ("3", "4", "1", "node-0", "29500"), strict=True):
        monkeypatch.setenv(variable, value)
    assert _env.torchrun() == _env.TorchrunEnv(
        rank=3, world_size=4, local_rank=1, master_addr="node-0", master_port=29500, exported=True
    )


def test_torchrun_with_the_least_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _env.torchrun() == _env.TorchrunEnv(rank=0, world_size=1)


@pytest.mark.parametrize("present", [(), ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")])
def test_no_torchrun(monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...]) -> None:
    for variable in present:
        monkeypatch.setenv(variable, "1")
    assert _env.torchrun() is None


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANK", "first", "RANK is 'first'; wanted an integer of at least 0"),
        ("RANK", "-1", "RANK is -1; wanted an integer of at least 0"),
        ("RANK", "2", "RANK is 2, but WORLD_SIZE is 2; valid ranks: 0 to 1"),
        ("WORLD_SIZE", "", "WORLD_SIZE is ''; wanted an integer of at least 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is 0; wanted an integer of at least 1"),
        ("LOCAL_RANK", "1.0", "LOCAL_RANK is '1.0'; wanted an integer of at least 0"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536; wanted an integer from 0 to 65535"),
    ],
)
def test_torchrun_malformed(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        _env.torchrun()
    assert str(caught.value) == message


def _reads_environment(source: str) -> bool:
    """Whether a module uses `os.environ` or `os.getenv` to read."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in ast.walk(ast.parse(source))
    )


def test_no_other_module_reads_the_environment() -> None:
    root = Path(shardcore.__file__).parent
    readers = {str(path.relative_to(root)) for path in root.rglob("*.py") if _reads_environment(path.read_text())}
    assert readers == {"_env.py"}


def test_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert _env.compilers() == ("g++", "clang++")
    monkeypatch.setenv("CXX", "icpx")
    assert _env.compilers() == ("icpx", "g++", "clang++")
