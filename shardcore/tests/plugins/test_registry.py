"""Discovery. The packs in these tests are real distributions: files in a folder that is on `sys.path`."""

from __future__ import annotations

import os
import subprocess
import sys

import importlib_metadata
import pytest
from given_packs import hook
from sites import Site, model, plugin, serves, status

from shardcore.errors import NoPolicyError, PackError
from shardcore.hooks import PolicySpec
from shardcore.plugins.registry import GROUP, Match, Registry, default_registry

TOO_NEW = (
    "PackError: it was written for plugin API 2, and this shardcore knows 1: "
    "upgrade shardcore, or install an older shard-bad"
)


def test_good(site: Site) -> None:
    site.install("good", serves("shard_good"), version="2.1")
    registry = site.discover()
    spec = PolicySpec(target="models.Model", policy="shard_good.policy:ModelPolicy")
    (pack,) = registry.packs
    assert (pack.name, pack.distribution, pack.version, pack.value) == (
        "good",
        "shard-good",
        "2.1",
        "shard_good.plugin",
    )
    assert (pack.status, pack.error, pack.specs) == ("loaded", None, (spec,))
    cls = model()
    assert registry.resolve(cls) == Match(spec=spec, pack=pack, cls=cls)


def test_a_plugin_without_a_distribution(site: Site) -> None:
    site.install("good", serves("shard_good"))
    registry = Registry.discover([importlib_metadata.EntryPoint("good", "shard_good.plugin", GROUP)])
    assert str(registry.packs[0]) == "good (unknown unknown)"
    assert registry.resolve(model()).load().__name__ == "ModelPolicy"


def test_order_does_not_depend_on_where_packs_are_found(site: Site) -> None:
    for name in ("b", "c", "a"):
        site.install(name, serves(f"shard_{name}"))
    entries = [entry for name in "acb" for entry in importlib_metadata.entry_points(group=GROUP, name=name)]
    forward, backward = Registry.discover(entries), Registry.discover(entries[::-1] + entries)
    assert list(status(forward)) == ["a", "b", "c"]
    assert forward.packs == backward.packs


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import does_not_exist", "ModuleNotFoundError: No module named 'does_not_exist'"),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line"),
        ("raise RuntimeError", "RuntimeError"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("", "PackError: shard_bad.plugin implements no hook: wanted a function shardcore_*, marked with hookimpl"),
        (hook("shardcore_policies", "raise KeyError('gone')"), "KeyError: 'gone'"),
        (
            hook("shardcore_policies", "yield 1"),
            "PackError: shardcore_policies returned <generator object shardcore_policies",
        ),
        (
            hook("shardcore_policies", "return ['a']"),
            "PackError: shardcore_policies returned ['a']; wanted a list of PolicySpec",
        ),
        (plugin("target='Model', policy='a:B'"), "ConfigError: PolicySpec: target is 'Model'; wanted a string like"),
        (plugin("target='a.B', policy='a:B', api=2"), TOO_NEW),
    ],
)
def test_a_broken_pack_hurts_nobody_else(site: Site, source: str, line: str) -> None:
    site.install("aaa", serves("shard_aaa"))
    site.install("bad", source)
    site.install("zzz", serves("shard_zzz", "models.Other"))
    registry, warning = site.broken()
    assert status(registry) == {"aaa": "loaded", "bad": "broken", "zzz": "loaded"}
    assert warning.startswith(f"pack bad (shard-bad 1.0), entry point 'shard_bad.plugin', failed to load: {line}")
    assert "\n" not in warning
    assert registry.resolve(model()).pack.name == "aaa"
    assert registry.resolve(model("Other")).pack.name == "zzz"
    with pytest.raises(NoPolicyError) as caught:
        registry.resolve(model("Unserved"))
    assert f"    bad (shard-bad 1.0): broken: {line}" in str(caught.value)


@pytest.mark.parametrize("function", ["shardcore_policies(model)", "shardcore_polices()"])
def test_a_wrong_hook_is_rolled_back(site: Site, function: str) -> None:
    site.install("bad", f"{serves('shard_bad')}\n@hookimpl\ndef {function}:\n    return []\n")
    site.install("zzz", serves("shard_zzz"))
    registry, warning = site.broken()
    assert status(registry) == {"bad": "broken", "zzz": "loaded"}
    assert f"PluginValidationError: {'unknown hook' if '()' in function else 'Plugin'}" in warning
    assert registry.resolve(model()).pack.name == "zzz"


def test_every_broken_pack_is_in_the_warning(site: Site) -> None:
    site.install("one", "raise OSError('1')")
    site.install("two", "raise OSError('2')")
    _, warning = site.broken()
    assert [line.rpartition(": ")[2] for line in warning.splitlines()] == ["1", "2"]


def test_one_module_under_two_names(site: Site) -> None:
    site.install("one", serves("shard_one"), entry="one = shard_one.plugin\ntwo = shard_one.plugin")
    registry, warning = site.broken()
    assert status(registry) == {"one": "loaded", "two": "broken"}
    assert "already registered" in warning
    assert registry.resolve(model()).pack.name == "one"


def test_one_name_in_two_distributions(site: Site) -> None:
    site.install("one", serves("shard_one"), entry="same = shard_one.plugin")
    site.install("two", serves("shard_two", "models.Other"), entry="same = shard_two.plugin")
    registry = site.discover()
    assert [str(pack) for pack in registry.packs] == ["same (shard-one 1.0)", "same (shard-two 1.0)"]
    assert registry.resolve(model("Other")).pack.distribution == "shard-two"


def test_lazy_attributes_of_a_plugin_stay_unloaded(site: Site) -> None:
    lazy = "def __dir__():\n    return ['lazy', 'shardcore_policies']\ndef __getattr__(name):\n    raise OSError(name)"
    site.install("lazy", serves("shard_lazy") + lazy)
    assert status(site.discover()) == {"lazy": "loaded"}


def test_strict_raises(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("bad", "import does_not_exist", version="0.3")
    monkeypatch.setenv("SHARDCORE_STRICT", "1")
    with pytest.raises(PackError, match=r"^pack bad \(shard-bad 0.3\), entry point 'shard_bad.plugin', ") as caught:
        site.discover()
    assert str(caught.value).endswith("failed to load: ModuleNotFoundError: No module named 'does_not_exist'")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("variable", "value", "loaded"),
    [
        ("SHARDCORE_DISABLE_PACKS", "", {"one", "two"}),
        ("SHARDCORE_DISABLE_PACKS", "two", {"one"}),
        ("SHARDCORE_DISABLE_PACKS", " shard-two , ", {"one"}),
        ("SHARDCORE_DISABLE_PACKS", "Shard_Two:two", {"one"}),
        ("SHARDCORE_DISABLE_PACKS", "shard-one:two", {"one", "two"}),
        ("SHARDCORE_PACKS", "", set()),
        ("SHARDCORE_PACKS", "one,three", {"one"}),
        ("SHARDCORE_PACKS", "shard-one, two", {"one", "two"}),
    ],
)
def test_blocked_by_the_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, loaded: set[str]
) -> None:
    for name in ("one", "two"):
        site.install(name, serves(f"shard_{name}", f"models.{name.title()}"))
    monkeypatch.setenv(variable, value)
    registry = site.discover()
    assert {name for name, now in status(registry).items() if now == "loaded"} == loaded
    assert {pack.status for pack in registry.packs} <= {"loaded", "blocked"}
    assert ("shard_two.plugin" in sys.modules) is ("two" in loaded)


def test_disabled_wins_over_allowed_and_spares_a_broken_pack(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("bad", "import does_not_exist")
    monkeypatch.setenv("SHARDCORE_PACKS", "bad")
    monkeypatch.setenv("SHARDCORE_DISABLE_PACKS", "bad")
    monkeypatch.setenv("SHARDCORE_STRICT", "1")
    assert status(site.discover()) == {"bad": "blocked"}


def test_default_registry_is_kept_until_cleared(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDCORE_PACKS", "shard-good")
    first = default_registry()
    assert default_registry() is first
    site.install("good", serves("shard_good"))
    default_registry.cache_clear()
    assert default_registry().resolve(model()).pack.name == "good"


def test_discovery_and_resolution_load_no_torch(site: Site) -> None:
    site.install("good", serves("shard_good", "user.Model"))
    code = (
        "import sys; from shardcore.plugins.registry import default_registry\n"
        "match = default_registry().resolve(type('Model', (), {'__module__': 'user'}))\n"
        "print(match.pack, *{'torch', 'transformers', 'shard_good.policy'} & set(sys.modules))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "SHARDCORE_PACKS": "shard-good"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, env=environment)
    assert done.stdout.decode() == "good (shard-good 1.0)\n"
