"""A picture of plans: one bar for each mesh, memory by kind, the limit as a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from shardcore.planner import KINDS

__all__ = ["Bar", "picture"]

#: What a bar is called, and its bytes by kind.
Bar = tuple[str, dict[str, int]]

_COLOURS = ("#1b4965", "#5fa8d3", "#bee9e8", "#f4a259")  # of `KINDS`, in their order
_GIB = 2**30
_WIDTH, _LEFT, _TOP = 900, 230, 70  # of the picture; where bars begin
_BAR, _STEP = 22, 34
_ROOM = _WIDTH - _LEFT - 90  # for the longest bar, with its number behind it


def picture(title: str, bars: Sequence[Bar], limit: int | None) -> str:
    """Return an SVG document.

    Args:
        title: what the picture shows.
        bars: from the top to the bottom.
        limit: the bytes that a rank has; None draws no line.
    """
    longest = max([sum(sizes.values()) for _, sizes in bars] + [limit or 0, 1])
    height = _TOP + _STEP * len(bars) + 40
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_legend(),
    ]
    for number, (name, sizes) in enumerate(bars):
        lines += _bar(name, sizes, _TOP + _STEP * number, longest)
    if limit is not None:
        x = _LEFT + _ROOM * limit / longest
        bottom = _TOP + _STEP * len(bars)
        lines.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#c1121f" stroke-width="2" '
            'stroke-dasharray="6 4"/>'
        )
        lines.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#c1121f">{limit / _GIB:.1f} GiB</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _legend() -> Iterator[str]:
    for number, (kind, colour) in enumerate(zip(KINDS, _COLOURS, strict=True)):
        x = _LEFT + 130 * number
        yield f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="49">{kind}</text>'


def _bar(name: str, sizes: dict[str, int], y: int, longest: int) -> Iterator[str]:
    yield f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
    x = float(_LEFT)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        width = _ROOM * sizes.get(kind, 0) / longest
        if width > 0:
            size = f"{name}, {kind}: {sizes[kind] / _GIB:.2f} GiB"
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
                f"<title>{escape(size)}</title></rect>"
            )
        x += width
    yield f'<text x="{x + 6:.1f}" y="{y + 16}">{sum(sizes.values()) / _GIB:.1f} GiB</text>'
