"""Running the code of packs: what it raises, or does to warnings, is theirs alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardcore.errors import PackError

Result = TypeVar("Result")


def attempt(call: Callable[[], Result], what: str) -> Result:
    """Return what code of a pack returns; whatever it raises is an `Exception` afterwards.

    Not only exceptions are contained: ``sys.exit`` in a plugin or a test framework's "skip this" must not end the
    program of somebody who merely has the pack installed: a `PackError`, which says ``what`` it was, is raised from it.
    An interrupt goes through: it is the user's Ctrl-C.
    """
    try:
        return call()
    except (Exception, KeyboardInterrupt):
        raise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int | str | None) else type(error.code).__name__
        raise PackError(f"{what} tried to end the process, with exit code {code!r}") from error
    except BaseException as error:
        raise PackError(f"{what} raised {in_one_line(error)}") from error


def in_full(error: BaseException) -> str:
    """Return the type and the text of an error, whose ``__str__`` may be anything."""
    name = type(error).__name__
    try:
        text = str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException as odd:
        text = f"(it has no text: its __str__ raised {type(odd).__name__})"
    return f"{name}: {text}" if text else name


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return in_full(error).partition("\n")[0]
