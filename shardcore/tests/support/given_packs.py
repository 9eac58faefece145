"""Small packs as real distributions: each is built into a wheel and installed into a folder."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardcore.plugins.registry import GROUP, default_registry

HEAD = "from shardcore.hooks import ParallelModuleSpec, PolicySpec, hookimpl\n"

VARIABLES = ("SHARDCORE_PACKS", "SHARDCORE_DISABLE_PACKS", "SHARDCORE_STRICT")


def hook(name: str, body: str, arguments: str = "") -> str:
    """Return the source of one hook."""
    return f"{HEAD}@hookimpl\ndef {name}({arguments}):\n    {body}\n"


def offers(name: str, *specs: str) -> str:
    """Return the source of a hook that returns a list."""
    return hook(name, f"return [{', '.join(specs)}]")


def serves(package: str, target: str = "tiny.TinyLM", rest: str = "") -> str:
    """Return the source of a plugin that serves one class by `{package}.policy:ModelPolicy`."""
    return offers("shardcore_policies", f"PolicySpec(target='{target}', policy='{package}.policy:ModelPolicy', {rest})")


def install(
    target: Path,
    name: str,
    plugin: str,
    *,
    version: str = "1.0",
    requires: Sequence[str] = (),
    modules: Mapping[str, str] | None = None,
    entry: str = "",
) -> None:
    """Install the distribution `shard-{name}`, whose package `shard_{name}` holds the plugin and further modules.

    Its entry point is `{name}`, unless `entry` says others.
    """
    package = f"shard_{name}"
    files = {f"{package}/{module}.py": source for module, source in {"plugin": plugin, **(modules or {})}.items()}
    files[f"{package}/__init__.py"] = ""
    entry_points = f"[{GROUP}]\n{entry or f'{name} = {package}.plugin'}\n"
    _install_wheel(target, f"shard-{name}", version, files, requires=requires, entry_points=entry_points)


def install_library(target: Path, name: str, version: str) -> None:
    """Install a distribution that is no pack."""
    _install_wheel(target, name, version, {f"{name.replace('-', '_')}.py": ""})


def install_entries(
    target: Path, name: str, group: str, entries: Mapping[str, str], modules: Mapping[str, str]
) -> None:
    """Install a distribution with entry points of one group, each given as its value, and modules, as their sources."""
    lines = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    files = {f"{module}.py": source for module, source in modules.items()}
    _install_wheel(target, name, "1.0", files, entry_points=f"[{group}]\n{lines}")


def _install_wheel(
    target: Path,
    distribution: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: Sequence[str] = (),
    entry_points: str = "",
) -> None:
    stem = f"{distribution.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    if any("extra ==" in line for line in requires):
        metadata.append("Provides-Extra: tested")
    metadata += [f"Requires-Dist: {line}" for line in requires]
    files = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    target.mkdir(parents=True, exist_ok=True)
    wheel = target / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)  # installing a wheel of pure Python is this
    wheel.unlink()
    importlib.invalidate_caches()


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@contextlib.contextmanager
def installed(*folders: Path | str) -> Iterator[None]:
    """Put folders of distributions on `sys.path` and discover anew; afterwards as if they had never been there."""
    before, path = set(sys.modules), list(sys.path)
    environ = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    sys.path[:0] = map(str, folders)
    importlib.invalidate_caches()
    default_registry.cache_clear()
    try:
        yield
    finally:
        sys.path[:] = path
        os.environ.update(environ)
        default_registry.cache_clear()
        for module in set(sys.modules) - before:
            if module.startswith("shard_"):
                del sys.modules[module]
