"""Real texts with labels that every Python carries: the docstrings of packages of its library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")


def docstrings() -> Iterator[tuple[str, int]]:
    """Yield the docstrings of each package of `PACKAGES`, with its number."""
    library = Path(sysconfig.get_path("stdlib"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for label, package in enumerate(PACKAGES):
        for file in sorted((library / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                text = ast.get_docstring(node) if isinstance(node, kinds) else None
                if text is not None and len(text) > 20:
                    yield " ".join(text.split()), label
