"""The files of a new pack."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import shardcore
from shardcore.errors import ConfigError
from shardcore.plugins.versions import installed
from shardcore_scaffold.cases import Example, cases
from shardcore_scaffold.distribution import Distribution
from shardcore_scaffold.draft import Draft, source
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.guess import guess
from shardcore_scaffold.infer import split_names
from shardcore_scaffold.names import check_model, check_name
from shardcore_scaffold.proof import settled
from shardcore_testing.cases import Case
from shardcore_testing.subject import cases_of, registry_of


def write_pack(name: str, example: Example, folder: Path, *, checked: bool = False) -> tuple[list[Path], Draft]:
    """Write a complete distribution for the class of a model below ``folder``; return its files, and what was drafted.

    Args:
        name: of the distribution, such as ``shard-stablelm``.
        example: a small model of the class.
        folder: where the distribution's own folder is made.
        checked: run the kit's quick checks first, on two ranks, and take back what fails.

    Raises:
        ConfigError: the name is none that works, the folder exists, no policy that was drafted fits the model, nothing
            of it can be split, or a name in the model cannot be written into a program.
    """
    check_name(name)
    check_model(example.model)
    root = folder / name
    if root.exists() or root.is_symlink():
        raise ConfigError(f"{root} exists already; choose another name or folder")
    facts = Facts(example.model, lambda model: model(**example.inputs))
    draft = _checked(facts, example) if checked else guess(facts)
    draft.doubts += [
        f"{module} is in the model, but not in the small one that was looked at" for module in example.unseen
    ]
    return list(_write(root, _files(name, example, draft))), draft


def _checked(facts: Facts, example: Example) -> Draft:
    """Return a draft that goes through the checks of the kit as the pack that it is written down as."""

    def made(folder: Path, name: str, draft: Draft) -> tuple[Case, str]:
        files = _files(f"shard-{name}", example, draft)
        sources = {path.removeprefix("src/"): text for path, text in files.items() if path.startswith("src/")}
        package, *_ = (file.parent.name for file in list(_write(folder, sources)))
        plugin = f"{package}.plugin"
        (case,) = cases_of(registry_of(plugin).packs[0].cases)
        return case, plugin

    found = settled(facts, made)
    if not split_names(example.model, found.draft):
        raise ConfigError(f"nothing of {type(example.model).__name__} can be split: {'; '.join(found.draft.doubts)}")
    found.draft.doubts += [f"the kit's check {check!r} fails: {said}" for check, said in found.failed.items()]
    return found.draft


def _write(folder: Path, files: Mapping[str, str]) -> Iterator[Path]:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        yield file


def _files(name: str, example: Example, draft: Draft) -> dict[str, str]:
    model = example.model
    package = name.replace("-", "_")
    short = name.removeprefix("shard-")
    cls = type(model)
    origin = cls.__module__.partition(".")[0]
    library = origin if installed(origin) else "torch"  # a module of one's own is tested with releases of torch
    version = str(installed(library)).partition("+")[0]
    values = {
        "name": name,
        "package": package,
        "short": short,
        "module": cls.__module__,
        "model": cls.__name__,
        "origin": origin,
        "library": library,
        "version": version,
        "series": ".".join(shardcore.__version__.split(".")[:2]),
        "next": _next(shardcore.__version__),
    }
    return {
        "pyproject.toml": _distribution(values, draft.packs).pyproject(),
        "README.md": _README.format(**values),
        "noxfile.py": _NOXFILE.format(**values),
        ".github/workflows/tests.yml": _CI,
        f"src/{package}/__init__.py": f'"""The {short} family for shardcore."""\n',
        f"src/{package}/plugin.py": _PLUGIN.format(**values),
        f"src/{package}/policy.py": source(cls, draft),
        f"src/{package}/cases.py": cases(short, example, draft),
        "tests/test_conformance.py": _TESTS.format(**values),
    }  # fmt: skip


def _distribution(values: dict[str, str], packs: Collection[str]) -> Distribution:
    library, version = values["library"], values["version"]
    ours = ["shardcore", *(["shardcore-transformers"] if library == "transformers" else [])]
    series = f">={values['series']},<{values['next']}"
    return Distribution(
        name=values["name"],
        description=f"The {values['short']} family of {values['origin']} for shardcore",
        dependencies=[*(f"{name}{series}" for name in ours), *sorted(packs), f"{library}>={version}"],
        extras={"tested": [f"{library}=={version}"], "testing": ["shardcore-testing>=0.1,<0.2"]},
        matrix={library: [version]},
        pytest={"addopts": ["-p", "shardcore_testing.plugin"], "pythonpath": ["src"], "timeout": 600},
    )


def _next(version: str) -> str:
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


_README = """\
# {name}

The pack that teaches [shardcore](https://pypi.org/project/shardcore/) to split `{model}` of {origin}
over many devices.

```
python -m pip install {name}
```

```python
# torchrun --nproc-per-node 2 train.py
import shardcore

model = shardcore.shard(model, tp=2)  # finds this pack by the model's class
```

`shardcore explain {model} --tp 2` shows what is done to the model, before it is done.

## Tested

{library} {version}. The tests are shardcore's conformance kit: outputs, losses and every gradient are those of the
unsharded model. `python -m pip install -e ".[testing]" && python -m pytest`; every release of the matrix: `nox`.
"""

_NOXFILE = '''\
"""``nox``: the tests against every release in ``[tool.shardcore.matrix]``."""

import tomllib
from pathlib import Path

import nox

MATRIX = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["shardcore"]["matrix"]["{library}"]


@nox.session
@nox.parametrize("release", MATRIX)
def tests(session, release):
    """Test against one release."""
    session.install("-e", ".[testing]", f"{library}=={{release}}")
    session.run("pytest", *session.posargs)
'''

_CI = """\
name: tests
on: [push, pull_request]
permissions:
  contents: read
jobs:
  tests:
    runs-on: ubuntu-latest
    steps:
      # Pinned by the commit of the release that is named: a tag can be moved.
      - uses: actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1
      - uses: actions/setup-python@5fda3b95a4ea91299a34e894583c3862153e4b97 # v7.0.0
        with:
          python-version: "3.11"
      - run: python -m pip install nox
      - run: python -m nox
"""

_PLUGIN = '''\
"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor {origin}."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve {model}."""
    return [
        PolicySpec(
            target="{module}.{model}",
            policy="{package}.policy:{model}Policy",
        )
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test it on a tiny model."""
    return ["{package}.cases:cases"]
'''

_TESTS = '''\
"""What every pack is held to; the cases are in `{package}.cases`."""

from shardcore_testing import PolicyConformance


class TestConformance(PolicyConformance):
    plugin = "{package}.plugin"
'''
