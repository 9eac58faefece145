"""What packs were tested with, against what is installed; and packs for classes that are not there."""

from __future__ import annotations

import json
import warnings

import pytest
from click.testing import CliRunner
from given_packs import install, install_library, serves
from sites import model

from shardcore.errors import PackError, UntestedVersionWarning
from shardcore.plugins import versions
from shardcore.plugins.registry import Match, Registry
from shardcore_cli import main

POLICY = {"policy": "from shardcore.policy import Policy\nclass ModelPolicy(Policy): pass\n"}


def match(folder, *requires: str, library: str | None = "2.1") -> Match:
    """Install a library, and a pack that requires what is given; return the match for the pack's model."""
    if library is not None:
        install_library(folder, "some-library", library)
    install(folder, "one", serves("shard_one", "models.Model"), version="1.5", requires=requires, modules=POLICY)
    return Registry.discover().resolve(model("Model"))


def says_nothing(found: Match) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return found.load().__name__ == "ModelPolicy"


@pytest.mark.parametrize("library", ["2.0", "2.1rc1", "2.9.1", "2.5.dev3", "2.1+local"])
def test_inside_of_the_tested_range(target, library):
    assert says_nothing(match(target, 'some-library>=2.0,<3; extra == "tested"', library=library))


@pytest.mark.parametrize("library", ["1.9", "3.0", "3.1rc1", "2.0rc1", "not a version"])
def test_outside_of_the_tested_range(target, library):
    found = match(target, 'some-library<3,>=2.0; extra == "tested"', library="1.0")
    info = target / "some_library-1.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("Version: 1.0", f"Version: {library}"))
    with pytest.warns(UntestedVersionWarning) as caught:
        assert found.load().__name__ == "ModelPolicy"
    (warning,) = caught
    assert str(warning.message) == (
        f"pack one (shard-one 1.5) was not tested with what is installed: some-library {library} is installed, tested "
        "is >=2.0,<3. Install some-library>=2.0,<3, or a release of shard-one that was tested with it; or go on, and "
        "check the results."
    )
    assert warning.filename == __file__


def test_it_is_said_once_by_the_first_rank(target, monkeypatch):
    match(target, 'some-library>=3; extra == "tested"')
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, times in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        registry = Registry.discover()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                registry.resolve(model("Model")).load()
        assert [w.category for w in caught] == [UntestedVersionWarning] * times


def test_strict_makes_it_an_error(target, monkeypatch):
    found = match(target, 'some-library>=2.2; extra == "tested"')
    monkeypatch.setenv("SHARDCORE_STRICT", "1")
    with pytest.raises(PackError) as caught:
        found.load()
    assert str(caught.value) == (
        "pack one (shard-one 1.5) was not tested with what is installed: some-library 2.1 is installed, tested is "
        ">=2.2. Install some-library>=2.2, or a release of shard-one that was tested with it; or unset "
        "SHARDCORE_STRICT, which makes this a warning."
    )


@pytest.mark.parametrize(
    "requires",
    [
        (),
        ("some-library>=9",),
        ('some-library>=9; extra == "other"',),
        ("some-library>=9; python_version >= '3'",),
        ("some-library>=9; python_version < '3' and extra == 'tested'",),
        ('absent-library>=9; extra == "tested"',),
        ('not a requirement; extra == "tested"',),
    ],
)
def test_what_says_nothing_about_tests_is_not_compared(target, requires):
    assert says_nothing(match(target, *requires))


def test_every_library_outside_is_named_and_nothing_else(target):
    install_library(target, "other-library", "5")
    found = match(
        target,
        "some-library<2 ; extra == 'tested'",
        "other-library==4.* ; python_version >= '3' and extra == 'Tested'",
        "torch>=1; extra == 'tested'",
    )
    with pytest.warns(UntestedVersionWarning) as caught:
        found.load()
    assert "some-library 2.1 is installed, tested is <2, other-library 5 is installed, tested is ==4.*." in str(
        caught[0].message
    )
    assert "torch" not in str(caught[0].message)


def test_a_pack_that_is_not_sharded_with_is_not_compared(target):
    install_library(target, "some-library", "1")
    install(target, "old", serves("shard_old", "models.Old"), requires=['some-library>=2; extra == "tested"'])
    assert says_nothing(match(target, library=None))


def test_the_command_shows_ranges_against_what_is_installed(target):
    match(
        target,
        'some-library<2,>=1; extra == "tested"',
        'absent-library>=9; extra == "tested"',
        'torch>=1; extra == "tested"',
        library="2.0rc1",
    )
    (row,) = [row for row in json.loads(CliRunner().invoke(main, ["packs", "--json"]).output) if row["name"] == "one"]
    torch = next(found.installed for found in versions.tested("shard-one") if found.library == "torch")
    optional = {"optional": True}  # nothing is required without the extra
    assert row["tested"] == [
        {"library": "some-library", "range": ">=1,<2", "installed": "2.0rc1", "inside": False, **optional},
        {"library": "absent-library", "range": ">=9", "installed": None, "inside": False, **optional},
        {"library": "torch", "range": ">=1", "installed": torch, "inside": True, **optional},
    ]
    result = CliRunner().invoke(main, ["packs"])
    (line,) = [line for line in result.output.splitlines() if line.startswith("one\t")]
    assert line.split("\t")[4] == (
        f"some-library >=1,<2 (2.0rc1, outside); absent-library >=9 (not installed); torch >=1 ({torch})"
    )
    assert result.exit_code == 0  # outside is no failure


def test_a_pack_for_a_class_that_the_library_lacks_hurts_nothing(target):
    """Targets are compared, not imported: what is not there is never sharded."""
    pack = serves("shard_next", "collections.TomorrowDict")
    install(target, "next", pack, modules={"policy": "from collections import TomorrowDict\n"})
    found = match(target)
    registry = Registry.discover()
    assert {pack.name: pack.status for pack in registry.packs}.items() >= {"next": "loaded", "one": "loaded"}.items()
    assert found.pack.name == "one"
    assert CliRunner().invoke(main, ["packs"]).exit_code == 0
    with pytest.raises(PackError, match=r"^pack next \(shard-next 1.0\): policy .* cannot import name 'TomorrowDict'"):
        registry.resolve(model("TomorrowDict", "collections")).load()
