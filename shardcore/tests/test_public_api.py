from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

import shardcore
from shardcore import errors

ON_FIRST_USE = {name: module for module, names in shardcore._HOMES.items() for name in names}


def _for_type_checkers() -> dict[str, str]:
    """Return name -> module of the imports that only type checkers see."""
    tree = ast.parse(Path(shardcore.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module) for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_all_is_sorted_and_complete() -> None:
    assert shardcore.__all__ == sorted({*ON_FIRST_USE, *errors.__all__} - {"Problem"})


def test_the_three_lists_agree() -> None:
    assert _for_type_checkers() == ON_FIRST_USE


def test_every_error_and_warning_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised == {name for name in shardcore.__all__ if name in errors.__all__}


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert shardcore.__version__ == project["version"]


def test_dir_lists_every_name_before_it_is_loaded() -> None:
    assert set(shardcore.__all__) <= set(dir(shardcore))
    assert dir(shardcore) == sorted(dir(shardcore))


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match=r"^module 'shardcore' has no attribute 'shrad'$"):
        _ = shardcore.shrad  # type: ignore[attr-defined]  # the point of the test


@pytest.mark.parametrize("name", shardcore.__all__)
def test_every_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(shardcore, name)
    home = importlib.import_module(ON_FIRST_USE.get(name, "shardcore.errors"))
    assert value is getattr(home, name)
    # The documentation of an instance such as `hookimpl` is that of its class.
    documentation = inspect.getdoc(value) or ""
    # A dataclass without one gets its signature instead.
    assert documentation.strip()
    assert not documentation.startswith(f"{name}(")


def test_no_word_has_the_name_of_a_module() -> None:
    """Whoever looks for one finds the other: tools that read sources do."""
    import pkgutil

    import shardcore.styles

    modules = {module.name for module in pkgutil.iter_modules(shardcore.styles.__path__)}
    assert modules.isdisjoint(shardcore.styles.__all__)
