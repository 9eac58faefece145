"""``shardcore explain --svg``: the mesh and the cuts in one picture."""

from __future__ import annotations

from html import escape

from shardcore.mesh.axes import Sizes
from shardcore.plan import ShardPlan
from shardcore_planner.cli.colours import STYLE
from shardcore_planner.cli.cuts import Cutting, cuttings, shape_in_words
from shardcore_planner.cli.drawings import cut, mesh, size_of

_EDGE, _HEAD, _ROW = 16, 44, 46  # pixels: around everything, for a heading, for a row of the cuts
_CUTS = "Cuts over tp {}: coloured is what the first rank holds"
_SIGN = 8.2  # pixels of a sign, at most on the average


def sheet(title: str, sizes: Sizes, plan: ShardPlan) -> str:
    """Return an SVG document.

    Args:
        title: what it shows.
        sizes: those of the mesh.
        plan: of the model.
    """
    ranks, drawn, rows = sizes.tp, mesh(sizes), cuttings(plan)
    across, tall = size_of(drawn)
    texts = [(row.names, _said(row)) for row in rows]
    longest = max((len(text) for both in texts for text in both), default=0)
    under = _EDGE + _HEAD + tall
    width = int(max(across, 70 + _SIGN * longest, _SIGN * 1.2 * max(len(title), len(_CUTS)))) + 2 * _EDGE
    height = under + _HEAD + _ROW * len(rows) + _EDGE
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" class="back" fill="#ffffff"/>',
        f'<text x="{_EDGE}" y="{_EDGE + 14}" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<g transform="translate({_EDGE} {_EDGE + 28})">{drawn}</g>',
        f'<text x="{_EDGE}" y="{under + 24}" font-weight="bold">{_CUTS.format(ranks)}</text>',
    ]
    for number, (row, (name, said)) in enumerate(zip(rows, texts, strict=True)):
        y = under + _HEAD + _ROW * number
        lines.append(f'<g transform="translate({_EDGE} {y})">{cut(row.full, row.local, ranks)}</g>')
        lines.append(f'<text x="{_EDGE + 70}" y="{y + 14}">{escape(name)}</text>')
        lines.append(f'<text x="{_EDGE + 70}" y="{y + 31}" font-size="12">{escape(said)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _said(row: Cutting) -> str:
    full, local = shape_in_words(row.full), shape_in_words(row.local)
    return f"{full}, {row.how}" if full == local else f"{full}, of a rank {local}, {row.how}"
