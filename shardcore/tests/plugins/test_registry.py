"""The packs in these tests are real distributions: files in a folder that is on `sys.path`."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
import pytest

from shardcore.errors import AmbiguousPolicyError, BrokenPackWarning, NoPolicyError, PackError
from shardcore.hooks import PolicySpec
from shardcore.plugins.registry import _FIRST_PARTY, GROUP, Match, Registry, default_registry

POLICY = """from shardcore.policy import Policy
class ModelPolicy(Policy): pass
class OtherPolicy(Policy): pass
NOT_A_CLASS = 1
"""
HOOK = "from shardcore.hooks import PolicySpec, hookimpl\n@hookimpl\ndef shardcore_policies():\n    "
TOO_NEW = (
    "PackError: it was written for plugin API 2, and this shardcore knows 1: "
    "upgrade shardcore, or install an older shard-bad"
)


def plugin(*specs: str) -> str:
    """Return the source of a plugin that offers specs, each given as the arguments of PolicySpec."""
    return f"{HOOK}return [{', '.join(f'PolicySpec({spec})' for spec in specs)}]\n"


def serves(package: str, target: str = "models.Model", rest: str = "") -> str:
    """Return the source of a plugin that serves one class."""
    return plugin(f"target='{target}', policy='{package}.policy:ModelPolicy', {rest}")


@dataclass
class Site:
    """A folder of installed distributions."""

    root: Path

    def install(self, name: str, source: str, *, version: str = "1.0", entry: str | None = None) -> None:
        """Write the distribution `shard-{name}` with the package `shard_{name}` and one entry point."""
        package = self.root / f"shard_{name}"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "plugin.py").write_text(source)
        (package / "policy.py").write_text(POLICY)
        entry = entry or f"{name} = shard_{name}.plugin"
        self.metadata(f"shard-{name}", version, f"[{GROUP}]\n{entry}\n")

    def metadata(self, distribution: str, version: str, entry_points: str = "") -> None:
        """Write what an installer leaves behind."""
        info = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()

    def discover(self) -> Registry:
        """Discover the packs of this folder; the environment of the tests may have others."""
        found = importlib_metadata.distributions(path=[str(self.root)])
        return Registry.discover(entry for dist in found for entry in dist.entry_points.select(group=GROUP))

    def broken(self) -> tuple[Registry, str]:
        """Discover, and return the text of the one warning too."""
        with pytest.warns(BrokenPackWarning) as caught:
            registry = self.discover()
        assert len(caught) == 1
        return registry, str(caught[0].message)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for variable in ("SHARDCORE_PACKS", "SHARDCORE_DISABLE_PACKS", "SHARDCORE_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    default_registry.cache_clear()
    yield Site(tmp_path)
    default_registry.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("shard_"):
            del sys.modules[module]


def model(name: str = "Model", module: str = "models", *bases: type) -> type:
    """Return a class with a full name of our choice."""
    return type(name, bases, {"__module__": module, "__qualname__": name})


def status(registry: Registry) -> dict[str, str]:
    return {pack.name: pack.status for pack in registry.packs}


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


def test_the_policy_is_imported_by_load_only(site: Site) -> None:
    site.install("good", serves("shard_good"))
    match = site.discover().resolve(model())
    assert "shard_good.policy" not in sys.modules
    policy = match.load()
    assert (policy.__module__, policy.__name__) == ("shard_good.policy", "ModelPolicy")


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
        (f"{HOOK}raise KeyError('gone')", "KeyError: 'gone'"),
        (f"{HOOK}yield 1", "PackError: shardcore_policies returned <generator object shardcore_policies"),
        (f"{HOOK}return ['a']", "PackError: shardcore_policies returned ['a']; wanted a list of PolicySpec"),
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


def test_a_tie_is_an_error_when_that_model_is_sharded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("one", serves("shard_one"), version="1.1")
    site.install("two", serves("shard_two"), version="2.2")
    registry = site.discover()
    assert status(registry) == {"one": "loaded", "two": "loaded"}
    with pytest.raises(AmbiguousPolicyError) as caught:
        registry.resolve(model("Mine", "user", model()))
    assert str(caught.value).splitlines() == [
        "several policies serve user.Mine, all for models.Model with priority 0:",
        "  shard_one.policy:ModelPolicy of pack one (shard-one 1.1)",
        "  shard_two.policy:ModelPolicy of pack two (shard-two 2.2)",
        "  way out: pass policy= (a Policy class or an instance)",
        "  way out: leave a pack out, with SHARDCORE_DISABLE_PACKS=shard-one:one or shard-two:two",
    ]
    monkeypatch.setenv("SHARDCORE_DISABLE_PACKS", "shard-one:one")
    assert site.discover().resolve(model()).pack.name == "two"


def test_a_tie_within_one_pack(site: Site) -> None:
    specs = [f"target='models.Model', policy='shard_one.policy:{name}Policy'" for name in ("Model", "Other")]
    site.install("one", plugin(*specs))
    with pytest.raises(AmbiguousPolicyError) as caught:
        site.discover().resolve(model())
    assert "SHARDCORE_DISABLE_PACKS" not in str(caught.value)


def test_the_same_policy_twice_is_no_tie(site: Site) -> None:
    spec = "target='models.Model', policy='shard_one.policy:ModelPolicy'"
    site.install("one", plugin(spec, spec))
    assert site.discover().resolve(model()).load().__name__ == "ModelPolicy"


def test_priority_breaks_a_tie(site: Site) -> None:
    site.install("one", serves("shard_one"))
    site.install("two", serves("shard_two", rest="priority=1"))
    assert site.discover().resolve(model()).pack.name == "two"


def test_the_nearest_class_wins_before_priority(site: Site) -> None:
    site.install("far", serves("shard_far", "models.Base", rest="priority=9"))
    site.install("near", serves("shard_near"))
    base = model("Base")
    served = model("Model", "models", base)
    match = site.discover().resolve(model("Mine", "user", served))
    assert (match.pack.name, match.cls) == ("near", served)
    assert site.discover().resolve(base).cls is base


def test_a_swapped_class_is_found(site: Site) -> None:
    site.install("good", serves("shard_good"))
    native = model()
    swapped = type(native.__name__, (native,), {"__module__": native.__module__, "__qualname__": native.__qualname__})
    assert site.discover().resolve(swapped).cls is swapped


@pytest.mark.parametrize(
    ("requires", "met"),
    [
        ("some-library", True),
        ("Some_Library>=2", True),
        ("some-library>=2.0rc1,<3", True),
        ("some-library>=2.1", False),
        ("some-library<2.0rc1", False),
        ("not-installed", False),
        ("not-installed; python_version < '3'", True),
        ("odd-library>=1", False),
    ],
)
def test_requires(site: Site, requires: str, met: bool) -> None:
    site.metadata("some-library", "2.1rc1")
    site.metadata("odd-library", "unknown")
    site.install("new", serves("shard_new", rest=f'requires="{requires}", priority=1'))
    site.install("old", serves("shard_old"))
    assert site.discover().resolve(model()).pack.name == ("new" if met else "old")


def test_no_policy_says_what_was_left_out(site: Site) -> None:
    site.metadata("some-library", "1.5")
    site.install("new", serves("shard_new", rest="requires='some-library>=2'"))
    site.install("off", serves("shard_off", rest="requires='absent'"))
    with pytest.raises(NoPolicyError) as caught:
        site.discover().resolve(model("Mine", "user", model()))
    assert str(caught.value).splitlines() == [
        "no installed pack serves user.Mine.",
        "  looked for: user.Mine, models.Model",
        "  installed packs:",
        "    new (shard-new 1.0): loaded",
        "    off (shard-off 1.0): loaded",
        "  left out: shard_new.policy:ModelPolicy of pack new (shard-new 1.0) requires some-library>=2 (here: 1.5)",
        "  left out: shard_off.policy:ModelPolicy of pack off (shard-off 1.0) requires absent (here: not installed)",
        "  way out: have a pack drafted: shardcore new-pack shard-mine --model user.Mine",
        "  way out: pass policy= (a Policy class or an instance), which needs no pack",
    ]


def test_no_policy_without_any_pack() -> None:
    with pytest.raises(NoPolicyError) as caught:
        Registry([]).resolve(model("Mine", "user"))
    assert str(caught.value).splitlines() == [
        "no installed pack serves user.Mine.",
        "  looked for: user.Mine",
        "  installed packs: none",
        "  way out: have a pack drafted: shardcore new-pack shard-mine --model user.Mine",
        "  way out: pass policy= (a Policy class or an instance), which needs no pack",
    ]


@pytest.mark.parametrize(("start", "pack"), _FIRST_PARTY.items())
def test_no_policy_names_the_first_party_pack(start: str, pack: str) -> None:
    served = model("Model", f"{start}modeling")
    with pytest.raises(NoPolicyError) as caught:
        Registry([]).resolve(model("Mine", "user", served))
    assert f"  the first-party pack for this family is {pack}" in str(caught.value).splitlines()
    assert "pip" not in str(caught.value)
    assert "new-pack" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("shard_one.nowhere:Policy", "failed to load: ModuleNotFoundError: No module named 'shard_one.nowhere'"),
        ("shard_one.policy:Gone", "failed to load: AttributeError: module 'shard_one.policy' has no attribute 'Gone'"),
        ("shard_one.policy:NOT_A_CLASS", "is 1; wanted a class"),
    ],
)
def test_a_policy_that_cannot_be_loaded(site: Site, policy: str, message: str) -> None:
    site.install("one", plugin(f"target='models.Model', policy='{policy}'"))
    match = site.discover().resolve(model())
    with pytest.raises(PackError) as caught:
        match.load()
    assert str(caught.value) == f"pack one (shard-one 1.0): policy {policy!r} {message}"
    assert (caught.value.__cause__ is not None) is ("failed" in message)


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
