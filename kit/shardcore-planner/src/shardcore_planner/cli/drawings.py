"""Drawings as SVG, whose colours the stylesheet around them may change: a mesh, a cut weight, a schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardcore.mesh.axes import Sizes
from shardcore_planner import Slot
from shardcore_planner.cli.colours import KINDS_OF_WORK

_CELL, _GAP, _TITLE = 46, 6, 24
_MOST = 8  # ranks of an axis that are drawn; of more, the first and the last ones

_FIRST, _LAST = (0x2F, 0x6F, 0xA8), (0x1B, 0x44, 0x69)  # of the squares, from left to right: white is read on all

_TALL, _WIDE = 36, 54  # of a drawn weight, at most

_ROW, _SLOT = 30, 26  # of a schedule: a rank's height, the width of a forward
_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def mesh(sizes: Sizes) -> str:
    """Return the ranks of a mesh: tp from left to right, replicas from top to bottom, a frame for each pp rank."""
    across, down, frames = (_drawn(size) for size in (sizes.tp, sizes.replicas, sizes.pp))
    wide, tall = len(across) * (_CELL + _GAP) + _GAP, len(down) * (_CELL + _GAP) + _GAP
    left, top = 34, _TITLE + (18 if sizes.pp > 1 else 0)
    width, height = left + len(frames) * (wide + 14), top + tall + 4
    lines = [f'<text x="{left + _GAP}" y="14" font-size="12">tp {sizes.tp} &#8594;</text>']
    if sizes.replicas > 1:
        middle = top + tall // 2
        at = f'x="14" y="{middle}" transform="rotate(-90 14 {middle})"'
        lines.append(f'<text {at} font-size="12" text-anchor="middle">dp {sizes.replicas}</text>')
    for place, frame in enumerate(frames):
        x = left + place * (wide + 14)
        if sizes.pp > 1:
            name = "&#8230;" if frame is None else f"pp {frame}"
            lines.append(f'<text x="{x + _GAP}" y="{_TITLE + 8}" font-size="12">{name}</text>')
            lines.append(
                f'<rect x="{x}" y="{top}" width="{wide}" height="{tall}" rx="6" fill="none" '
                'class="line" stroke="#cfd6df"/>'
            )
        for row, replica in enumerate(down):
            for column, member in enumerate(across):
                rank = None if None in (frame, replica, member) else _number(sizes, frame, replica, member)
                lines += _square(x + _GAP + column * (_CELL + _GAP), top + _GAP + row * (_CELL + _GAP), column, rank)
    return _svg(width, height, f"{sizes.ranks} ranks", lines)


def _number(sizes: Sizes, frame: int | None, replica: int | None, member: int | None) -> int:
    return ((frame or 0) * sizes.replicas + (replica or 0)) * sizes.tp + (member or 0)


def _drawn(size: int) -> list[int | None]:
    """Return the positions on an axis that are drawn; None stands for those between."""
    return list(range(size)) if size <= _MOST else [*range(_MOST - 2), None, size - 1]


def _square(x: int, y: int, column: int, rank: int | None) -> Iterator[str]:
    if rank is not None:
        shade = "".join(f"{round(a + (b - a) * column / (_MOST - 1)):02x}" for a, b in zip(_FIRST, _LAST, strict=True))
        yield f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="5" fill="#{shade}"/>'
    text = "&#8230;" if rank is None else str(rank)
    colour = "" if rank is None else ' class="on" fill="#ffffff"'
    yield f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 5}" font-size="14" text-anchor="middle"{colour}>{text}</text>'


def cut(full: Sequence[int], local: Sequence[int], ranks: int) -> str:
    """Return a weight with the part of the first rank in colour: dim 0 from top to bottom, dim 1 from left to right."""
    rows, columns = (*full, 1, 1)[:2] if len(full) > 1 else ((*full, 1)[0], 1)
    tall = max(10.0, min(_TALL, _TALL * rows / max(rows, columns)))
    wide = max(10.0, min(_WIDE, _WIDE * columns / max(rows, columns)))
    split = next((dim for dim, (a, b) in enumerate(zip(full, local, strict=False)) if a != b), None)
    share = 1.0 if split is None else local[split] / full[split]
    down = split != 1
    part = (wide, tall * share) if down else (wide * share, tall)
    lines = [
        f'<rect x="1" y="1" width="{wide:.1f}" height="{tall:.1f}" class="away" fill="#dfe6ee"/>',
        f'<rect x="1" y="1" width="{part[0]:.1f}" height="{part[1]:.1f}" fill="#2f6fa8"/>',
    ]
    for number in range(1, min(ranks, 16) if split is not None else 1):
        at = 1 + (tall if down else wide) * min(1.0, number * share)
        ends = f'x1="1" x2="{1 + wide:.1f}" y1="{at:.1f}" y2="{at:.1f}"'
        if not down:
            ends = f'y1="1" y2="{1 + tall:.1f}" x1="{at:.1f}" x2="{at:.1f}"'
        lines.append(f'<line {ends} class="edge" stroke="#ffffff" stroke-width="1"/>')
    return _svg(_WIDE + 2, int(tall) + 2, "a weight and the part of the first rank", lines)


def schedule(slots: Sequence[Slot]) -> str:
    """Return what each rank of a pipeline does when, from left to right; the number is that of the micro-batch."""
    if not slots:
        return ""
    unit = min(slot.end - slot.start for slot in slots if slot.kind == "F")
    scale = min(_SLOT, 1600 * unit / max(slot.end for slot in slots)) / unit
    ranks = 1 + max(slot.rank for slot in slots)
    stages = len({slot.stage for slot in slots})
    width, left = max(slot.end for slot in slots) * scale, 58
    lines = [f'<text x="0" y="{_ROW * rank + 20}" font-size="12">rank {rank}</text>' for rank in range(ranks)]
    for slot in slots:
        x, y, wide = left + slot.start * scale, _ROW * slot.rank + 3, (slot.end - slot.start) * scale
        said = f"{_WORDS[slot.kind]} of micro-batch {slot.micro_batch} in stage {slot.stage}"
        late = 0.65 if stages > ranks and slot.stage >= ranks else 1.0
        lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_ROW - 6}" fill="{KINDS_OF_WORK[slot.kind]}" '
            f'fill-opacity="{late}" class="edge" stroke="#ffffff"><title>{said}</title></rect>'
        )
        if wide > 9:
            lines.append(
                f'<text x="{x + wide / 2:.1f}" y="{y + 16}" font-size="11" text-anchor="middle" '
                f'class="work">{slot.micro_batch}</text>'
            )
    names = [kind for kind in "FBIW" if any(slot.kind == kind for slot in slots)]
    for place, kind in enumerate(names):
        x, y = left + 150 * place, _ROW * ranks + 10
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{KINDS_OF_WORK[kind]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 11}" font-size="12">{_WORDS[kind]}</text>')
    return _svg(int(max(left + width, left + 150 * len(names))) + 4, _ROW * ranks + 30, "schedule", lines)


def _svg(width: int, height: int, title: str, lines: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">'
    return "\n".join([head, f"<title>{title}</title>", *lines, "</svg>"])


def size_of(drawn: str) -> tuple[int, int]:
    """Return how wide and how tall a drawing is."""
    found = re.search(r'width="(\d+)" height="(\d+)"', drawn)
    return (int(found[1]), int(found[2])) if found else (0, 0)
