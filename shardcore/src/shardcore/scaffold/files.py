"""The files of a new pack."""

from __future__ import annotations

import textwrap
from pathlib import Path

import importlib_metadata
from torch import nn

import shardcore
from shardcore.errors import ConfigError
from shardcore.scaffold.distribution import Distribution
from shardcore.scaffold.guess import Draft, guess, lines
from shardcore.scaffold.names import check_model, check_name

__all__ = ["write_pack"]


def write_pack(name: str, model: nn.Module, folder: Path) -> list[Path]:
    """Write a complete distribution for the class of ``model`` below ``folder`` and return its files.

    Args:
        name: of the distribution, such as ``shard-gpt-neox``.
        model: a model of the class, on the meta device.
        folder: where the distribution's own folder is made.

    Raises:
        ConfigError: the name is none that works, the folder exists, nothing can be guessed, or a name in the model
            cannot be written into a program.
    """
    check_name(name)
    check_model(model)
    root = folder / name
    if root.exists() or root.is_symlink():
        raise ConfigError(f"{root} exists already; choose another name or folder")
    draft = guess(model)
    texts = _files(name, model, draft)
    written = []
    for path, text in texts.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        written.append(file)
    return written


def _files(name: str, model: nn.Module, draft: Draft) -> dict[str, str]:
    package = name.replace("-", "_")
    short = name.removeprefix("shard-")
    cls = type(model)
    library = cls.__module__.partition(".")[0]
    try:
        version = importlib_metadata.version(library)
    except importlib_metadata.PackageNotFoundError:
        version = ""
    values = {
        "name": name,
        "package": package,
        "short": short,
        "module": cls.__module__,
        "model": cls.__name__,
        "library": library,
        "version": version,
        "floor": f">={version}" if version else "",
        "config": type(getattr(model, "config", None)).__name__,
        "generates": str(callable(getattr(model, "generate", None))),
        "imports": _imports(model),
        "series": ".".join(shardcore.__version__.split(".")[:2]),
        "next": _next(shardcore.__version__),
    }
    return {
        "pyproject.toml": _distribution(values).pyproject(),
        "README.md": _README.format(**values),
        "noxfile.py": _NOXFILE.format(**values),
        ".github/workflows/tests.yml": _CI,
        f"src/{package}/__init__.py": f'"""The {short} family for shardcore."""\n',
        f"src/{package}/plugin.py": _PLUGIN.format(**values),
        f"src/{package}/policy.py": _policy(values, draft),
        f"src/{package}/cases.py": _CASES.format(**values),
        "tests/test_conformance.py": _TESTS.format(**values),
    }


def _distribution(values: dict[str, str]) -> Distribution:
    library, version = values["library"], values["version"]
    return Distribution(
        name=values["name"],
        description=f"The {values['short']} family of {library} for shardcore",
        dependencies=[f"shardcore>={values['series']},<{values['next']}", f"{library}{values['floor']}"],
        extras={"tested": [f"{library}=={version}"], "testing": ["shardcore[testing]"]},
        matrix={library: [version]},
        pytest={"addopts": ["-p", "shardcore.testing.plugin"], "timeout": 600},
    )


def _imports(model: nn.Module) -> str:
    """Return the lines that import a model's class and its configuration."""
    classes = [type(model), type(getattr(model, "config", None))]
    return "\n".join(sorted({f"from {cls.__module__} import {cls.__name__}" for cls in classes}))


def _next(version: str) -> str:
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def _policy(values: dict[str, str], draft: Draft) -> str:
    base = "PretrainedPolicy" if values["library"] == "transformers" else "Policy"
    home = "integrations.transformers" if base == "PretrainedPolicy" else "policy"
    imports = ["ModulePolicy", "Stages", *(["Heads"] if draft.checks else [])]
    if base == "Policy":
        imports.append("Policy")
    head = [f"from shardcore.{home} import {base}"] if base == "PretrainedPolicy" else []
    doubts = "".join(
        f"{textwrap.fill(doubt, 116, initial_indent='#   - ', subsequent_indent='#     ')}\n"
        for doubt in dict.fromkeys(draft.doubts)
    )
    body = "\n".join(f"        {line}" for line in lines(draft))
    return (
        f'"""How {values["model"]} is sharded."""\n\nfrom __future__ import annotations\n\n'
        + "".join(f"{line}\n" for line in head)
        + f"from shardcore.policy import {', '.join(sorted(imports))}\n"
        + f"from shardcore.styles import {', '.join(sorted(draft.words))}\n\n"
        + "# The rules below were guessed from names and sizes. Read the model's forward beside them, and look at:\n"
        + doubts
        + f"\n\nclass {values['model']}Policy({base}):\n"
        + f'    """Guessed from the module tree of {values["library"]} {values["version"]}."""\n\n'
        + (f"    checks = {draft.checks}\n" if draft.checks else "")
        + f"    stages = Stages(\n{_stages(draft)}    )\n\n"
        + "    def module_policy(self) -> ModulePolicy:\n"
        + '        """Return the rows of each class."""\n'
        + body
        + "\n"
    )


def _stages(draft: Draft) -> str:
    """Return the arguments of ``Stages``, a part on each line if it fits, and a name on each line if it does not."""
    text = ""
    for part, names in draft.stages.items():
        quoted = [f'"{name}"' for name in names]
        value = quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})"
        line = f"        {part}={value},"
        if len(line) > 120:
            line = "\n".join([f"        {part}=(", *(f"            {name}," for name in quoted), "        ),"])
        text += f"{line}\n"
    return text


_README = """\
# {name}

The pack that teaches [shardcore](https://pypi.org/project/shardcore/) to split `{model}` of {library}
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
"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor {library}."""

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

_CASES = '''\
"""The tiny models on which the conformance kit tests this pack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
{imports}

from shardcore.testing import Case, Supports

__all__ = ["cases"]


def build(*, dropout: float = 0.0, **options: Any) -> {model}:
    """Return a tiny model whose every parameter is random, the same in every process."""
    # EDIT: sizes that are small, and a vocabulary that no number of ranks divides. Heads: a multiple of 4.
    config = {config}(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, **options
    )
    for name in vars(config):
        # EDIT: name the dropouts of this configuration, if they are named otherwise.
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, dropout)
    model = {model}(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def inputs(model: {model}, seed: int) -> dict[str, Tensor]:
    """Return the arguments of one call."""
    # EDIT: what the model takes.
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, model.config.vocab_size, (3, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[seed % 3, 6:] = 0
    return {{"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}}


def cases() -> list[Case]:
    """Return the cases of this pack."""
    return [
        Case(
            name="{short}",
            build=build,
            inputs=inputs,
            outputs=("logits",),
            supports=Supports(generation={generates}),
        ),
    ]
'''

_TESTS = '''\
"""What every pack is held to; the cases are in `{package}.cases`."""

from shardcore.testing import PolicyConformance


class TestConformance(PolicyConformance):
    plugin = "{package}.plugin"
'''
