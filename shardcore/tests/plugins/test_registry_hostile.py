"""A pack may do anything when it is imported: it breaks nobody but itself, and a blocked one does nothing at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from given_packs import hook, install, installed, offers, serves

import shardcore
from shardcore.errors import BrokenPackWarning, PackError
from shardcore.hooks import PolicySpec
from shardcore.plugins.registry import GROUP, Registry
from shardcore_cli import main

SILENT = "class Silent(Exception):\n    def __str__(self): raise RuntimeError('no words')\n"
ODD = "class Odd:\n    def __repr__(self): raise RuntimeError('no words')\n"


def discover():
    """Discover with warnings caught, and return the states by name and the text of the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = Registry.discover()
    text = "\n".join(str(one.message) for one in caught if issubclass(one.category, BrokenPackWarning))
    return {pack.name: pack.status for pack in registry.packs if pack.name in {"aaa", "bad", "zzz"}}, text


def good(target, name, cls):
    install(target, name, serves(f"shard_{name}", f"models.{cls}"))


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("raise BaseException('gone')", "PackError: shard_bad.plugin raised BaseException: gone"),
        ("import pytest\npytest.skip('not here', allow_module_level=True)", "raised Skipped: "),
        ("raise GeneratorExit", "shard_bad.plugin raised GeneratorExit"),
        ("import sys\nsys.exit(0)", "shard_bad.plugin tried to end the process, with exit code 0"),
        ("import sys\nsys.exit([1])", "shard_bad.plugin tried to end the process, with exit code 'list'"),
        (f"{SILENT}raise Silent", "Silent: (it has no text: its __str__ raised RuntimeError)"),
        ("class Exit(BaseException):\n    def __str__(self): raise self\nraise Exit", "Exit: (it has no text"),
        ("import warnings\nwarnings.simplefilter('error')\nraise OSError('gone')", "OSError: gone"),
        ("import sys\nsys.modules[__name__] = object()", "shard_bad.plugin implements no hook"),
        (f"import sys\n{SILENT}class M:\n    def __dir__(self): raise Silent\nsys.modules[__name__] = M()", "Silent"),
        (
            "import sys\nclass M:\n    def __eq__(self, other): sys.exit(3)\nsys.modules[__name__] = M()",
            "shard_bad.plugin tried to end the process, with exit code 3",
        ),
        (hook("shardcore_policies", "raise GeneratorExit"), "shard_bad.plugin raised GeneratorExit"),
        (hook("shardcore_policies", "return [Odd()]") + ODD, "shardcore_policies returned [<Odd instance at "),
        (hook("shardcore_policies", "return Odd()") + ODD, "shardcore_policies returned <Odd instance at "),
        (offers("shardcore_policies", "PolicySpec(target='a.B', policy='a:B', priority='high')"), "priority is 'high'"),
    ],
)
def test_whatever_a_plugin_raises_breaks_that_pack_only(target, plugin, reason):
    good(target, "aaa", "A")
    install(target, "bad", plugin)
    good(target, "zzz", "Z")
    before = warnings.filters[:]
    states, text = discover()
    assert states == {"aaa": "loaded", "bad": "broken", "zzz": "loaded"}
    assert reason in text
    assert warnings.filters[: len(before)] == before
    result = CliRunner().invoke(main, ["packs", "--json"])
    assert result.exit_code == 1
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert reason in rows["bad"]["error"]
    assert rows["aaa"]["status"] == rows["zzz"]["status"] == "loaded"


@pytest.fixture
def heard():
    """SIGINT arrives, in the background too, where shells let it be ignored."""
    native = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, native)


@pytest.mark.usefixtures("heard")
def test_an_interrupt_by_the_user_is_not_the_packs(target):
    install(
        target,
        "bad",
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(50): time.sleep(0.1)",
    )
    with pytest.raises(KeyboardInterrupt):
        Registry.discover()


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_metadata_that_is_not_utf_8(target, file):
    good(target, "aaa", "A")
    good(target, "bad", "B")
    good(target, "zzz", "Z")
    damaged = target / "shard_bad-1.0.dist-info" / file
    damaged.write_bytes(damaged.read_bytes() + b"\n# \xff\n")
    registry = _quietly()
    states = {pack.name: pack.status for pack in registry.packs}
    assert (states["aaa"], states["zzz"]) == ("loaded", "loaded")
    if file == "METADATA":  # what it is called is lost; what it serves is not
        assert states["bad"] == "loaded"
        assert next(pack for pack in registry.packs if pack.name == "bad").distribution == "unknown"
    else:
        (pack,) = (pack for pack in registry.packs if pack.distribution == "shard-bad")
        assert (pack.name, pack.status) == ("shard-bad", "broken")
        assert "entry_points.txt" in pack.value
        assert isinstance(pack.error, UnicodeDecodeError)
    assert CliRunner().invoke(main, ["packs"]).exit_code == (file == "entry_points.txt")


def _quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BrokenPackWarning)
        return Registry.discover()


def test_entry_points_of_others_that_cannot_be_read_are_passed_over(target):
    good(target, "aaa", "A")
    info = target / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"[console_scripts]\nx = \xff:main\n")
    states, text = discover()
    assert (states, text) == ({"aaa": "loaded"}, "")


@pytest.mark.parametrize(("entries", "found"), [("one = shard_one.plugin", {("one", "2.0")}), ("", set())])
def test_of_two_copies_of_a_distribution_the_first_on_the_path_counts(tmp_path, entries, found):
    for folder, version, line in (("first", "2.0", entries), ("second", "1.0", "stale = shard_one.plugin")):
        install(tmp_path / folder, "one", serves("shard_one", "models.M"), version=version)
        file = tmp_path / folder / f"shard_one-{version}.dist-info" / "entry_points.txt"
        file.write_text(f"[{GROUP}]\n{line}\n")
    with installed(tmp_path / "first", tmp_path / "second"):
        packs = Registry.discover().packs
    assert {(pack.name, pack.version) for pack in packs if pack.distribution == "shard-one"} == found


MARK = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.mark.parametrize(("variable", "value"), [("SHARDCORE_DISABLE_PACKS", "bad"), ("SHARDCORE_PACKS", "aaa")])
@pytest.mark.parametrize("command", ["packs", "doctor"])
def test_nothing_of_a_blocked_pack_is_imported(target, monkeypatch, variable, value, command):
    good(target, "aaa", "A")
    good(target, "bad", "B")
    ran = target / "ran"
    for module in ("__init__", "plugin"):
        file = target / "shard_bad" / f"{module}.py"
        file.write_text(MARK.format(str(ran)) + "raise SystemExit(0)\n")
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(main, [command, "--json", *["--quick"] * (command == "doctor")])
    assert not ran.exists()
    assert "shard_bad" not in sys.modules
    found = json.loads(result.stdout)
    if command == "packs":
        (row,) = (row for row in found if row["name"] == "bad")
        assert row["status"] == "blocked"
        assert row["location"] == str(target / "shard_bad" / "plugin.py")
    else:
        assert any("bad" in check["what"] and "blocked" in check["why"] for check in found["checks"])


def test_what_a_plugin_prints_is_no_part_of_the_answer(target):
    source = "import os\nprint('from Python')\nos.system('echo from a program')\nos.write(1, b'from C\\n')\n"
    install(target, "bad", source + hook("shardcore_policies", "print('from a hook')\n    return []"))
    path = os.pathsep.join([str(target), str(next(iter(shardcore.__path__)).rpartition(os.sep)[0])])
    done = subprocess.run(
        [sys.executable, "-c", "from shardcore_cli import main; main(['packs', '--json'])"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])},
    )
    assert "bad" in {row["name"] for row in json.loads(done.stdout)}
    for source in ("Python", "a program", "C", "a hook"):
        assert f"from {source}\n" in done.stderr


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys\nsys.exit(0)", "failed to load: PackError: shard_one.policy:P tried to end the process"),
        ("raise GeneratorExit", "failed to load: PackError: shard_one.policy:P raised GeneratorExit"),
        (f"{SILENT}raise Silent", "failed to load: Silent: (it has no text"),
        ("import builtins\nP = dict", "is dict, which is no subclass of shardcore.policy.Policy"),
        ("P = print", "is <built-in function print>; wanted a class"),
        (f"{ODD}P = Odd()", "is <Odd instance at "),
    ],
)
def test_a_policy_module_that_does_anything(target, source, reason):
    install(
        target,
        "one",
        offers("shardcore_policies", "PolicySpec(target='models.M', policy='shard_one.policy:P')"),
        modules={"policy": source},
    )
    cls = type("M", (), {"__module__": "models", "__qualname__": "M"})
    match = Registry.discover().resolve(cls)
    with pytest.raises(PackError) as caught:
        match.load()
    assert str(caught.value).startswith("pack one (shard-one 1.0): policy 'shard_one.policy:P' ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import sys; sys.exit(0)", "PackError: shardcore_before_shard tried to end the process, with exit code 0"),
        ("raise BaseException('gone')", "PackError: shardcore_before_shard raised BaseException: gone"),
        ("raise Silent", "Silent: (it has no text"),
    ],
)
def test_an_observer_that_does_anything(target, body, reason):
    install(target, "one", SILENT + hook("shardcore_before_shard", body, "model, plan"))
    registry = Registry.discover()
    with pytest.raises(PackError, match=r"^pack one \(shard-one 1.0\): shardcore_before_shard failed for a ") as caught:
        registry.observe("before", SimpleNamespace(), None)
    assert reason in str(caught.value)


def test_a_requirement_that_cannot_be_evaluated_is_refused_when_it_is_made():
    with pytest.raises(shardcore.ConfigError, match="requires is "):
        PolicySpec(target="a.B", policy="a:B", requires="timm; python_version ~= 'three'")


def test_a_library_whose_version_cannot_be_read_counts_as_absent(target):
    rest = "requires='some-library>=1'"
    install(target, "new", serves("shard_new", "models.M", rest + ", priority=1"))
    install(target, "old", serves("shard_old", "models.M"))
    info = target / "some_library-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: some-library\nVersion: \xff\n")
    cls = type("M", (), {"__module__": "models", "__qualname__": "M"})
    assert Registry.discover().resolve(cls).pack.name == "old"
