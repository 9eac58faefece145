"""What commands run in: libraries that may be broken, and code of others that prints. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from shardcore.errors import ConfigError
from shardcore.plugins.isolation import attempt, in_one_line


@contextlib.contextmanager
def answer_only() -> Iterator[None]:
    """Send what plugins, policies and models print to stderr, so that stdout holds the answer of the command alone.

    Also what goes past Python, such as the output of programs that they start.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # the command was started without a stdout
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            with contextlib.suppress(OSError):
                os.dup2(2, 1)
            yield
    finally:
        if sys.__stdout__ is not None and not sys.__stdout__.closed:
            sys.__stdout__.flush()  # what was printed past the redirection
        os.dup2(kept, 1)
        os.close(kept)


def torch_failure() -> str | None:
    """Return why torch cannot be imported, or None if it can."""
    try:
        version = attempt(_torch_version, "import torch")
    except Exception as error:
        return in_one_line(error)
    return None if version else "it has no version: what is left of it is an empty folder; install it anew"


def _torch_version() -> str | None:
    import torch

    return getattr(torch, "__version__", None)


def require_torch() -> None:
    """Refuse to go on where torch cannot be imported.

    Raises:
        ConfigError: torch is absent or broken.
    """
    if failure := torch_failure():
        raise ConfigError(f"torch fails: {failure}. Install a torch that works; shardcore doctor shows what is here")
