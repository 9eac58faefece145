"""The hooks beyond policies: modules that packs bring, cases for the conformance kit, and what may go wrong there."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from click.testing import CliRunner
from given_packs import HEAD, hook, install, install_library, offers, serves

from shardcore import hooks
from shardcore.errors import AmbiguousPolicyError, BrokenPackWarning, ConfigError, NoPolicyError, PackError
from shardcore.hooks import API_VERSION, ParallelModuleSpec
from shardcore.plugins.registry import Registry
from shardcore_cli import main

VALID = {"target": "natives.Norm", "module": "shard_mine.norms:Fused", "replaces": "Plain"}


class Plain:
    """Stands for a class of shardcore."""


class Norm:
    def forward(self):
        """Stand for the forward of a native module."""


Norm.__module__, Norm.__qualname__ = "natives", "Norm"


class Renamed(Norm):
    """A subclass that computes nothing by itself."""


class Changed(Norm):
    def forward(self):
        """Compute something else."""


def brings(package, rest="", cls="Fused"):
    spec = f"ParallelModuleSpec(target='natives.Norm', module='{package}.norms:{cls}', replaces='Plain', {rest})"
    return offers("shardcore_parallel_modules", spec)


def kernels(target, name, rest="", **options):
    """Install a pack that brings a module for `natives.Norm`."""
    source = f"from {__name__} import Plain\nclass Fused(Plain): pass\nclass Stranger: pass\nVALUE = 1\n"
    install(target, name, brings(f"shard_{name}", rest, **options), modules={"norms": source})


def find(native=Norm, replaces=Plain, on=()):
    return Registry.discover().parallel_module(native, replaces, lambda option: option in on)


@pytest.mark.parametrize("name", [name for name in hooks.__all__ if name.startswith("shardcore_")])
def test_every_hook_is_in_the_manual(name):
    assert f"| `{name}` | " in hooks.__doc__


def test_defaults_of_a_spec():
    spec = ParallelModuleSpec(**VALID)
    assert (spec.option, spec.priority, spec.requires, spec.api) == (None, 0, None, API_VERSION)
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert not hasattr(spec, "__dict__")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("target", "Norm", "target is 'Norm'; wanted a string like 'package.module.Class'"),
        ("module", "shard_mine.norms.Fused", "module is 'shard_mine.norms.Fused'; wanted a string like 'module:Class'"),
        ("module", Plain, f"module is {Plain!r}; wanted a string like 'module:Class'"),
        ("replaces", Plain, f"replaces is {Plain!r}; wanted the bare name of a class of shardcore.nn, like 'Repl"),
        ("replaces", "nn.Plain", "replaces is 'nn.Plain'; wanted the bare name of a class of shardcore.nn, like 'Repl"),
        ("option", "fused", "option is 'fused'; wanted None or one of 'enable_flash_attention', 'enable_fused_norma"),
        ("requires", "two words", "requires is 'two words'; wanted a PEP 508 requirement like 'some-library>=5'"),
        ("api", 0, "api is 0; wanted 1 or more (this shardcore knows 1)"),
    ],
)
def test_a_spec_that_is_refused(field, value, wanted):
    with pytest.raises(ConfigError) as caught:
        ParallelModuleSpec(**{**VALID, field: value})
    assert str(caught.value).startswith(f"ParallelModuleSpec: {wanted}")


@pytest.mark.parametrize(
    ("plugin", "line"),
    [
        (hook("shardcore_parallel_modules", "return [1]"), "returned [1]; wanted a list of ParallelModuleSpec"),
        (hook("shardcore_parallel_modules", "raise OSError('gone')"), "OSError: gone"),
        (brings("shard_bad", "option='fast'"), "ConfigError: ParallelModuleSpec: option is 'fast'; wanted None or"),
        (brings("shard_bad", "api=2"), "PackError: it was written for plugin API 2, and this shardcore knows 1"),
        (hook("shardcore_parallel_modules", "return []", "model"), "PluginValidationError"),
        (offers("shardcore_conformance_cases", "'module.function'"), "wanted a list of strings like 'module:callable'"),
        (offers("shardcore_conformance_cases", "print"), "wanted a list of strings like 'module:callable'"),
        (hook("shardcore_before_shard", "pass", "model, plan, rank"), "PluginValidationError"),
        (
            f"{HEAD}@hookimpl(wrapper=True)\ndef shardcore_after_shard(model):\n    return (yield)\n",
            "PackError: shardcore_after_shard is a wrapper, and each pack's hooks are called by themselves",
        ),
    ],
)
def test_a_pack_whose_hook_is_wrong_hurts_nobody_else(target, plugin, line):
    install(target, "bad", plugin + serves("shard_bad", "models.Bad").removeprefix(HEAD))
    kernels(target, "good")
    with pytest.warns(
        BrokenPackWarning, match=r"^pack bad \(shard-bad 1.0\), entry point 'shard_bad.plugin', "
    ) as caught:
        registry = Registry.discover()
    assert line in str(caught[0].message)
    assert registry.parallel_module(Norm, Plain, lambda _: False).__module__ == "shard_good.norms"
    (bad,) = (pack for pack in registry.packs if pack.name == "bad")
    assert (bad.specs, bad.modules, dict(bad.observers)) == ((), (), {})
    with pytest.raises(NoPolicyError):
        registry.resolve(type("Bad", (), {"__module__": "models"}))


def test_a_module_is_found_and_imported_then_only(target):
    kernels(target, "good")
    registry = Registry.discover()
    assert "shard_good.norms" not in sys.modules
    assert registry.parallel_module(Plain, Plain, lambda _: True) is None
    assert "shard_good.norms" not in sys.modules
    found = registry.parallel_module(Norm, Plain, lambda _: False)
    assert found is sys.modules["shard_good.norms"].Fused
    assert registry.parallel_module(Norm, Norm, lambda _: True) is None  # replaces another class


def test_a_subclass_is_served_as_long_as_it_runs_the_same_forward(target):
    kernels(target, "good")
    assert find(Renamed) is not None
    assert find(Changed) is None


@pytest.mark.parametrize(("on", "found"), [((), False), (("enable_jit_fused",), True), (("enable_flash",), False)])
def test_a_switch_turns_it_on(target, on, found):
    kernels(target, "good", "option='enable_jit_fused'")
    assert (find(on=on) is not None) is found


@pytest.mark.parametrize(("value", "found"), [(True, True), ("auto", True), (False, False), (None, False)])
def test_the_switches_are_those_of_a_configuration(target, value, found):
    @dataclasses.dataclass
    class Config:
        enable_jit_fused: object

    kernels(target, "good", "option='enable_jit_fused'")
    modules_for = Registry.discover().modules_for
    assert (modules_for(Config(value))(Norm, Plain) is not None) is found
    assert modules_for(object())(Norm, Plain) is None


def test_requires_and_priority_choose(target):
    install_library(target, "some-library", "2.0rc1")
    kernels(target, "first", "requires='some-library>=2.1', priority=2")
    kernels(target, "second", "requires='some-library>=2.0rc1', priority=1")
    kernels(target, "third")
    assert find().__module__ == "shard_second.norms"


def test_a_tie_names_both_packs(target):
    kernels(target, "one")
    kernels(target, "two")
    registry = Registry.discover()
    with pytest.raises(AmbiguousPolicyError) as caught:
        registry.parallel_module(Renamed, Plain, lambda _: False)
    assert str(caught.value).splitlines() == [
        f"several modules replace Plain for {__name__}.Renamed, all for natives.Norm with priority 0:",
        "  shard_one.norms:Fused of pack one (shard-one 1.0)",
        "  shard_two.norms:Fused of pack two (shard-two 1.0)",
        "  way out in Python: pass policy= (a Policy class, an instance or a mapping)",
        "  way out: leave a pack out, with SHARDCORE_DISABLE_PACKS=shard-one:one or shard-two:two",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Gone", "failed to load: AttributeError: module 'shard_bad.norms' has no attribute 'Gone'"),
        ("VALUE", "is 1; wanted a class"),
        (
            "Stranger",
            f"is no subclass of {__name__}.Plain, which it replaces for natives.Norm; derive it from that class",
        ),
    ],
)
def test_a_module_that_cannot_be_used(target, name, message):
    kernels(target, "bad", cls=name)
    with pytest.raises(PackError) as caught:
        find()
    text = str(caught.value).removesuffix(", or correct replaces=")
    assert text == f"pack bad (shard-bad 1.0): parallel module 'shard_bad.norms:{name}' {message}"


def test_one_module_for_two_classes_fits_one_of_them(target):
    fields = [{**VALID, "module": "shard_k.norms:Fused", "replaces": name} for name in ("Plain", "Norm")]
    both = [f"ParallelModuleSpec(**{own})" for own in fields]
    source = f"from {__name__} import Plain\nclass Fused(Plain): pass\n"
    install(target, "k", offers("shardcore_parallel_modules", *both), modules={"norms": source})
    registry = Registry.discover()
    assert registry.parallel_module(Norm, Plain, lambda _: False) is not None
    with pytest.raises(PackError, match=r"is no subclass of natives\.Norm"):
        registry.parallel_module(Norm, Norm, lambda _: False)


def test_conformance_cases_are_names(target):
    cases = offers("shardcore_conformance_cases", "'shard_one.cases:tiny'", "'shard_one.cases:larger'")
    install(target, "one", cases, modules={"cases": "raise RuntimeError('imported too early')\n"})
    (pack,) = [pack for pack in Registry.discover().packs if pack.name == "one"]
    assert pack.cases == ("shard_one.cases:tiny", "shard_one.cases:larger")


def test_the_command_lists_what_packs_bring(target):
    watch = hook("shardcore_before_shard", "pass").removeprefix(HEAD)
    cases = offers("shardcore_conformance_cases", "'shard_one.cases:tiny'").removeprefix(HEAD)
    install(target, "one", brings("shard_one") + watch + cases)
    (row,) = [row for row in json.loads(CliRunner().invoke(main, ["packs", "--json"]).output) if row["name"] == "one"]
    assert row["modules"][0]["module"] == "shard_one.norms:Fused"
    assert (row["observes"], row["conformance_cases"]) == (["shardcore_before_shard"], ["shard_one.cases:tiny"])
    assert "\tNorm by shard_one.norms:Fused\t" in CliRunner().invoke(main, ["packs"]).output


def test_observers_get_the_arguments_they_take_in_the_order_of_packs(target):
    install(target, "b", hook("shardcore_before_shard", "model.append(('b', plan))", "plan, model"))
    install(target, "a", hook("shardcore_before_shard", "model.append('a')", "model"))
    install(target, "c", hook("shardcore_after_shard", "model.append('c')", "model"))
    seen = []
    registry = Registry.discover()
    registry.observe("before", seen, "the plan")
    assert seen == ["a", ("b", "the plan")]
    registry.observe("after", seen, "the plan")
    assert seen[2:] == ["c"]
    assert [pack.name for pack in registry.active] == ["a", "b", "c"]


def test_an_observer_that_raises_is_named(target):
    install(target, "one", hook("shardcore_after_shard", "raise KeyError('x')"), version="1.5")
    with pytest.raises(PackError) as caught:
        Registry.discover().observe("after", [], None)
    assert str(caught.value) == (
        "pack one (shard-one 1.5): shardcore_after_shard failed for a list: KeyError: 'x'. Report it to the pack, or "
        "leave the pack out with SHARDCORE_DISABLE_PACKS=shard-one:one"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_pack_that_ends_the_process_hurts_nobody_else(target):
    install(target, "leaves", "raise SystemExit(3)\n")
    kernels(target, "works")
    with pytest.warns(BrokenPackWarning, match="tried to end the process, with exit code 3"):
        registry = Registry.discover()
    assert {pack.name: pack.status for pack in registry.packs if pack.name in ("leaves", "works")} == {
        "leaves": "broken",
        "works": "loaded",
    }


def test_a_blocked_pack_is_named_with_what_blocks_it(target, monkeypatch):
    kernels(target, "works")
    monkeypatch.setenv("SHARDCORE_DISABLE_PACKS", "works")
    with pytest.raises(NoPolicyError, match="blocked by SHARDCORE_PACKS or SHARDCORE_DISABLE_PACKS"):
        Registry.discover().resolve(Norm)
