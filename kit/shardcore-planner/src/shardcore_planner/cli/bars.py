"""A picture of plans: one bar for each mesh, memory by kind, the limit as a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from shardcore_cli.tables import in_words
from shardcore_planner import KINDS
from shardcore_planner.cli.colours import KINDS_OF_MEMORY, STYLE

#: What a bar is called, and its bytes by kind.
Bar = tuple[str, dict[str, int]]

_TOP = 70  # where bars begin
_BAR, _STEP = 22, 34
_ROOM, _BEHIND = 580, 100  # for the longest bar, and for its number behind it
_SIGN = 8.2  # pixels of a sign, at most on the average


def picture(title: str, bars: Sequence[Bar], limit: int | None) -> str:
    """Return an SVG document.

    Args:
        title: what the picture shows.
        bars: from the top to the bottom.
        limit: the bytes that a rank has; None draws no line.
    """
    longest = max([sum(sizes.values()) for _, sizes in bars] + [limit or 0, 1])
    left = 24 + int(_SIGN * max((len(name) for name, _ in bars), default=0))
    width = max(left + _ROOM + _BEHIND, 24 + int(1.3 * _SIGN * len(title)))
    height = _TOP + _STEP * len(bars) + 40
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" class="back" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_legend(left),
    ]
    for number, (name, sizes) in enumerate(bars):
        lines += _bar(name, sizes, left, _TOP + _STEP * number, longest)
    if limit is not None:
        x = left + _ROOM * limit / longest
        bottom = _TOP + _STEP * len(bars)
        lines.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" class="limit" stroke="#c1121f" '
            'stroke-width="2" stroke-dasharray="6 4"/>'
        )
        lines.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" class="limit" fill="#c1121f">'
            f"{in_words(limit)}</text>"
        )
    lines += [_number(sizes, left, _TOP + _STEP * at, longest) for at, (_, sizes) in enumerate(bars)]
    return "\n".join([*lines, "</svg>", ""])


def _legend(left: int) -> Iterator[str]:
    for number, (kind, colour) in enumerate(zip(KINDS, KINDS_OF_MEMORY, strict=True)):
        x = left + 130 * number
        yield f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="49">{kind}</text>'


def _bar(name: str, sizes: dict[str, int], left: int, y: int, longest: int) -> Iterator[str]:
    yield f'<text x="{left - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
    x = float(left)
    for kind, colour in zip(KINDS, KINDS_OF_MEMORY, strict=True):
        width = _ROOM * sizes.get(kind, 0) / longest
        if width > 0:
            size = f"{name}, {kind}: {in_words(sizes[kind])}"
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
                f"<title>{escape(size)}</title></rect>"
            )
        x += width


def _number(sizes: dict[str, int], left: int, y: int, longest: int) -> str:
    """Return the number behind a bar, which is read before the line of the limit too."""
    whole = sum(sizes.values())
    around = 'class="edge" stroke="#ffffff" stroke-width="5" paint-order="stroke"'
    return f'<text x="{left + _ROOM * whole / longest + 6:.1f}" y="{y + 16}" {around}>{in_words(whole)}</text>'
