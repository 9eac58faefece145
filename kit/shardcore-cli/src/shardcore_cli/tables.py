"""Tables: drawn for a person at a terminal, tab-separated for a pipe."""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text


#: Words that say how something is, and how they are shown: nothing else in a table has a colour.
_COLOURS = {
    **dict.fromkeys(("passed", "works", "loaded", "yes"), "green"),
    **dict.fromkeys(("failed", "fails", "broken", "no"), "bold red"),
    **dict.fromkeys(("missing", "blocked", "closed", "not tried"), "yellow"),
}

#: Where a word may be folded: behind these signs (not in a number), before a capital that follows a small letter.
_SEAM = re.compile(r"(?<=[._/,:=-])(?=\D)|(?<=,)|(?<=[a-z0-9])(?=[A-Z])|(?<=\w)(?=[<>]=?\d)")

_FRAME = 3  # signs that a column takes besides its text


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, spare: int = 0) -> bool:
    """Print a table; without a terminal, a header line and one line of tab-separated cells for each row.

    Args:
        title: stands above it at a terminal.
        columns: their names.
        rows: the cells.
        spare: how many of the last columns are left out at a terminal that has no room for them.

    Returns:
        Whether all columns are there.
    """
    if not sys.stdout.isatty():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(cell.replace("\n", "; ").replace("\t", " ") for cell in row))
        return True
    from rich.console import Console

    console = Console(highlight=False)
    cells = [list(row) for row in rows]
    whole = not spare or _fit([list(columns), *cells], console.width)
    end = None if whole else -spare
    console.print(drawn(title, columns[:end], [row[:end] for row in cells], console.width))
    return whole


def _fit(cells: Sequence[Sequence[str]], width: int) -> bool:
    """Tell whether a table is at most ``width`` wide although nothing in it is folded."""
    sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return sum(sizes) + 1 + _FRAME * len(sizes) <= width


def say(text: str, state: str = "", *, err: bool = False) -> None:
    """Print text; on a terminal in the colour of a state, with lines that end between words and keep their indent."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        click.echo(text, err=err)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, stderr=err)
    for line in text.split("\n"):
        for part in wrapped(line, console.width):
            console.print(Text(part, style=_COLOURS.get(state, "")), soft_wrap=True)


def wrapped(line: str, width: int) -> list[str]:
    """Return a line as several that are at most ``width`` wide, as far as words are; further ones are indented."""
    indent = " " * (len(line) - len(line.lstrip()) or 4)
    found = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return found or [""]


def drawn(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Group | Table:
    """Return a table that is at most ``width`` signs wide.

    Names are folded at their seams and never in the middle: behind a dot, before a capital. What is too wide even so is
    turned on its side, a column for each row; and if that is too wide too, each row is a list.
    """
    from rich.console import Group
    from rich.text import Text

    cells = [list(columns), *map(list, rows)]
    on_its_side = [list(column) for column in zip(*cells, strict=True)]
    for shape in (cells, on_its_side):
        room = widths(shape, width - 1 - _FRAME * len(shape[0]))
        if sum(room) + 1 + _FRAME * len(shape[0]) <= width:
            return _table(title, shape, room)
    lines = [Text(title, style="italic")]
    for row in rows:
        lines += [Text(""), *(_line(name, cell) for name, cell in zip(columns, row, strict=True) if cell)]
    return Group(*lines)


def _line(name: str, cell: str) -> Text:
    from rich.text import Text

    return Text.assemble((name, "bold"), ": ", _coloured(cell.replace("\n", ", "), len(cell)), overflow="fold")


def _table(title: str, cells: Sequence[Sequence[str]], room: Sequence[int]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    head, *rows = cells
    for column, size in zip(head, room, strict=True):
        table.add_column(Text("\n".join(folded(column, size))), no_wrap=True, min_width=size)
    for row in rows:
        table.add_row(*(_coloured(cell, size) for cell, size in zip(row, room, strict=True)))
    return table


def _coloured(cell: str, size: int) -> Text:
    from rich.text import Text

    word = cell.partition("\n")[0]
    return Text("\n".join(folded(cell, size)), style=_COLOURS.get(word, ""))


def widths(cells: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return how wide each column is so that all of them fit into ``room``.

    That column gives way in which it costs the fewest lines: down to its longest word first, and if that is not enough
    down to the longest part of a word that has no seam. Below that none goes, so that the sum may be above ``room``.
    """
    by_column = list(zip(*cells, strict=True))
    height = functools.cache(lambda number, size: sum(len(folded(cell, size)) for cell in by_column[number]))
    words = [[word for cell in column for word in cell.split()] or [""] for column in by_column]
    whole = [max(map(len, found)) for found in words]
    parts = [max(len(part) for word in found for part in _SEAM.split(word)) for found in words]
    found = [max(len(line) for cell in column for line in cell.split("\n")) for column in by_column]
    found = [min(size, max(room, least)) for size, least in zip(found, parts, strict=True)]
    for floors in (whole, parts):
        while sum(found) > room:
            able = [number for number, size in enumerate(found) if size > floors[number]]
            if not able:
                break
            costs = {n: height(n, found[n] - 1) - height(n, found[n]) for n in able}
            found[min(able, key=lambda number: (costs[number], -found[number]))] -= 1
    return found


def folded(text: str, width: int) -> list[str]:
    """Return the lines of ``text``, none wider than ``width`` unless a part of a word has no seam."""
    return [line for given in text.split("\n") for line in _folded(given, max(width, 1))]


def _folded(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        glue = " " if lines[-1] else ""
        if len(lines[-1]) + len(glue) + len(word) <= width:
            lines[-1] += glue + word
            continue
        parts = [word] if len(word) <= width else _SEAM.split(word)
        for number, part in enumerate(parts):
            join = glue if number == 0 else ""
            if lines[-1] and (number == 0 or len(lines[-1]) + len(join) + len(part) > width):
                lines.append(part)
            else:
                lines[-1] += join + part
    return lines


def in_words(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
