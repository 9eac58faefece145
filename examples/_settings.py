"""Settings from a TOML file and from flags: one dataclass says what there is, its defaults and its help."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def option(default: Any, text: str) -> Any:
    """Return a field of a dataclass with a default and a line of help."""
    return field(default=default, metadata={"help": text})


def read(cls: type[Settings], about: str | None) -> Settings:
    """Read the command line and the file that ``--config`` names: flags come first, then the file, then defaults.

    A field ``save_every`` is the flag ``--save-every``, or ``--save_every``, and the key ``save_every``. A key that is
    no field is an error.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a TOML file with any of the settings below")
    known: dict[str, Any] = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    for name, each in known.items():
        shown = f"{each.metadata['help']} [{each.default}]"
        how: dict[str, Any] = {"type": type(each.default)}
        if isinstance(each.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        names = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        parser.add_argument(*names, default=argparse.SUPPRESS, help=shown, **how)
    flags = vars(parser.parse_args())
    file = flags.pop("config")
    values = tomllib.loads(file.read_text(encoding="utf-8")) if file else {}
    if wrong := sorted(values.keys() - known.keys()):
        parser.error(f"{file} has {', '.join(wrong)}; known settings: {', '.join(known)}")
    return cls(**{name: type(known[name].default)(value) for name, value in {**values, **flags}.items()})
