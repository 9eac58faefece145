"""What the page for a browser draws is what the plan says."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from shardcore.mesh.axes import Sizes
from shardcore.pipeline import SCHEDULES
from shardcore_planner.cli.drawings import cut, mesh, schedule, size_of
from shardcore_planner.timeline import bubble, orders, slots

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawn):
    return [text.text for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def test_a_mesh_has_the_ranks_as_torch_numbers_them():
    said = texts(mesh(Sizes(pp=2, dp_shard=2, tp=3)))
    assert [int(text) for text in said if text.isdigit()] == list(range(12))
    assert {"pp 0", "pp 1", "dp 2"} <= set(said)
    assert "dp 1" not in texts(mesh(Sizes(tp=2)))


def test_of_many_ranks_the_first_and_the_last_are_drawn():
    said = [int(text) for text in texts(mesh(Sizes(tp=64))) if text.isdigit()]
    assert said == [0, 1, 2, 3, 4, 5, 63]


def _light(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_number_of_every_rank_can_be_read():
    root = ElementTree.fromstring(mesh(Sizes(tp=8)))
    squares = [rect.get("fill") for rect in root.iter(f"{SVG}rect")]
    numbers = [text.get("fill") for text in root.iter(f"{SVG}text") if text.text.isdigit()]
    assert len(squares) == len(numbers) == 8
    for square, number in zip(squares, numbers, strict=True):
        assert (_light(number) + 0.05) / (_light(square) + 0.05) > 4.5
    assert not [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill-opacity")]


@pytest.mark.parametrize(
    ("full", "local", "down"),
    [((8, 4), (2, 4), True), ((8, 4), (8, 1), False), ((4,), (1,), True), ((4, 4), (4, 4), True)],
)
def test_a_cut_has_the_share_of_the_rank(full, local, down):
    whole, part = ElementTree.fromstring(cut(full, local, 4)).iter(f"{SVG}rect")
    side, other = ("height", "width") if down else ("width", "height")
    share = 1 if full == local else 0.25
    assert float(part.get(side)) == pytest.approx(share * float(whole.get(side)), abs=0.1)
    assert part.get(other) == whole.get(other)


def test_the_size_of_a_drawing():
    root = ElementTree.fromstring(drawn := mesh(Sizes(tp=3, dp_shard=2)))
    assert size_of(drawn) == (int(root.get("width")), int(root.get("height")))


def test_a_schedule_shows_every_action_and_its_waiting():
    order = orders(SCHEDULES["1f1b"], 4, 1, 8)
    found = slots(order)
    assert len(found) == sum(map(len, order)) == 4 * 16
    busy = sum(slot.end - slot.start for slot in found)
    assert 1 - busy / (4 * max(slot.end for slot in found)) == pytest.approx(bubble(order))
    rects = [r for r in ElementTree.fromstring(schedule(found)).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert len(rects) == len(found)
    by_rank = {}
    for rect in rects:
        x = float(rect.get("x"))
        by_rank.setdefault(rect.get("y"), []).append((x, x + float(rect.get("width"))))
    for spans in by_rank.values():
        spans.sort()
        assert all(end <= start + 0.11 for (_, end), (start, _) in itertools.pairwise(spans))
