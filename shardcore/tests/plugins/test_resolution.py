"""Which policy serves a class: the nearest, by priority, if its requirements are met; and what is said if none does."""

from __future__ import annotations

import sys

import importlib_metadata
import pytest
from sites import Site, model, plugin, serves, status

from shardcore.errors import AmbiguousPolicyError, NoPolicyError, PackError
from shardcore.plugins.registry import Registry
from shardcore.plugins.unserved import families, for_a_shell, installing


def test_the_policy_is_imported_by_load_only(site: Site) -> None:
    site.install("good", serves("shard_good"))
    match = site.discover().resolve(model())
    assert "shard_good.policy" not in sys.modules
    policy = match.load()
    assert (policy.__module__, policy.__name__) == ("shard_good.policy", "ModelPolicy")


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
        "  way out in Python: pass policy= (a Policy class, an instance or a mapping)",
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


def test_a_pattern_stands_for_modules_of_any_name(site: Site) -> None:
    site.install("any", serves("shard_any", "remote.*.Model", rest="priority=9"))
    site.install("one", serves("shard_one", "remote.of_one.code.Model"))
    registry = site.discover()
    assert registry.resolve(model("Model", "remote.folder.a1b2.code")).pack.name == "any"
    assert registry.resolve(model("Model", "remote.of_one.code")).pack.name == "one"  # whatever a pattern's priority
    for other in (model("Model", "remote"), model("Other", "remote.of_one.code"), model("Model", "a.remote.code")):
        with pytest.raises(NoPolicyError):
            registry.resolve(other)


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
    site.library("some-library", "2.1rc1")
    site.library("odd-library", "unknown")
    site.install("new", serves("shard_new", rest=f'requires="{requires}", priority=1'))
    site.install("old", serves("shard_old"))
    assert site.discover().resolve(model()).pack.name == ("new" if met else "old")


def test_no_policy_says_what_was_left_out(site: Site) -> None:
    site.library("some-library", "1.5")
    site.install("new", serves("shard_new", rest="requires='some-library>=2'"))
    site.install("off", serves("shard_off", rest="requires='absent'"))
    with pytest.raises(NoPolicyError) as caught:
        site.discover().resolve(model("Mine", "user", model()))
    assert str(caught.value).splitlines() == [
        "no installed pack serves user.Mine.",
        "  way out: have a pack drafted: shardcore new-pack shard-mine --example module:function",
        "  way out in Python: pass policy= (a Policy class, an instance or a mapping), which needs no pack",
        "  left out: shard_new.policy:ModelPolicy of pack new (shard-new 1.0) requires some-library>=2 (here: 1.5)",
        "  left out: shard_off.policy:ModelPolicy of pack off (shard-off 1.0) requires absent (here: not installed)",
        "  looked for: user.Mine, models.Model",
        "  installed packs:",
        "    loaded: new, off",
    ]


def test_no_policy_without_any_pack() -> None:
    with pytest.raises(NoPolicyError) as caught:
        Registry([]).resolve(model("Mine", "user"))
    assert str(caught.value).splitlines() == [
        "no installed pack serves user.Mine.",
        "  way out: have a pack drafted: shardcore new-pack shard-mine --example module:function",
        "  way out in Python: pass policy= (a Policy class, an instance or a mapping), which needs no pack",
        "  looked for: user.Mine",
        "  installed packs: none",
    ]
    assert "Python" not in for_a_shell(str(caught.value))
    assert len(for_a_shell(str(caught.value)).splitlines()) == 4


@pytest.mark.parametrize(("start", "pack"), families().items())
def test_no_policy_names_the_first_party_pack(start: str, pack: str) -> None:
    served = model("Model", f"{start}modeling")
    with pytest.raises(NoPolicyError) as caught:
        Registry([]).resolve(model("Mine", "user", served))
    line = str(caught.value).splitlines()[1]
    assert line.startswith(f"  way out: install {pack}, the first-party pack for this family")
    assert "pip install shard" not in str(caught.value)  # none is published
    assert line.endswith(f"/packs/{pack}")
    assert "new-pack" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("file://{here}/shardcore", ": python -m pip install {here}/packs/shard-bert"),
        (
            "file://{here}/elsewhere/shardcore",
            ", from a checkout of shardcore: python -m pip install ./packs/shard-bert",
        ),
        ("https://example.org/shardcore", ", from a checkout of shardcore: python -m pip install ./packs/shard-bert"),
    ],
)
def test_the_line_that_installs_a_pack_names_the_sources_that_are_here(tmp_path, monkeypatch, url, line) -> None:
    (tmp_path / "packs" / "shard-bert").mkdir(parents=True)
    monkeypatch.setattr(
        importlib_metadata.PathDistribution, "read_text", lambda self, name: f'{{"url": "{url.format(here=tmp_path)}"}}'
    )
    assert installing("packs/shard-bert") == line.format(here=tmp_path)


def test_no_policy_says_what_is_the_matter_with_the_first_party_pack(site: Site, monkeypatch) -> None:
    served = model("BertOther", "transformers.models.bert.modeling_bert")
    site.install("bert", serves("shard_bert"))
    with pytest.raises(NoPolicyError) as caught:
        site.discover().resolve(served)
    assert "  the first-party pack for this family, shard-bert, is installed and serves other classes of it" in str(
        caught.value
    )
    assert "shardcore new-pack shard-mine --model transformers.models.bert." in str(caught.value)
    monkeypatch.setenv("SHARDCORE_DISABLE_PACKS", "bert")
    with pytest.raises(NoPolicyError) as caught:
        site.discover().resolve(served)
    assert "    blocked by SHARDCORE_PACKS or SHARDCORE_DISABLE_PACKS: bert" in str(caught.value).splitlines()
    assert "  way out: let bert into SHARDCORE_PACKS, or out of SHARDCORE_DISABLE_PACKS" in str(caught.value)


def test_no_policy_names_the_bases_that_a_policy_could_be_for() -> None:
    base = model("Pre", "transformers.models.new_one.modeling", model("PreTrainedModel", "transformers.modeling_utils"))
    with pytest.raises(NoPolicyError) as caught:
        Registry([]).resolve(model("NewModel", "transformers.models.new_one.modeling", base))
    name = "transformers.models.new_one.modeling.NewModel"
    lines = str(caught.value).splitlines()
    assert lines[1] == f"  way out: have a pack drafted: shardcore new-pack shard-new-one --model {name}"
    bases = "transformers.models.new_one.modeling.Pre, transformers.modeling_utils.PreTrainedModel"
    assert f"  looked for: {name}, {bases}" in lines


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
