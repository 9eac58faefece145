"""How large each room may be: a budget of lines, raised only by a commit that says why."""

from __future__ import annotations

import pytest
from packages import AROUND, files_of

#: Room of the core -> the most lines. Files beside the rooms are "others".
ROOMS = {
    "agree": 690,
    "apply": 1020,
    "checkpoint": 1970,
    "comm": 1680,
    "compile": 1308,
    "config": 652,
    "fsdp": 965,
    "hooks": 300,
    "mesh": 850,
    "nn": 7900,
    "others": 1466,
    "pipeline": 2670,
    "plan": 1840,
    "plugins": 790,
    "policy": 330,
    "styles": 1890,
    "transfer": 280,
    "weights": 1470,
}
#: Package around the core -> the most lines.
KITS = {
    "shardcore_shardformer": 3060,
    "shardcore_transformers": 3540,
    "shardcore_quantized": 1000,
    "shardcore_peft": 2320,
    "shardcore_trainer": 2110,
    "shardcore_cli": 923,
    "shardcore_debug": 100,
    "shardcore_loop": 1260,
    "shardcore_planner": 4600,
    "shardcore_testing": 5575,
    "shardcore_scaffold": 5225,
}
#: All of the core, and of its rooms those that define the hooks; decided in docs/adr/0037-what-is-around-the-core.md.
CORE = 27995
HOOKS = 18500
OF_THE_HOOKS = ("plugins", "policy", "hooks", "styles", "plan", "compile", "apply", "nn", "comm", "mesh", "config")


def lines_by_room(package: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for module, file in files_of(package):
        parts = module.split(".")[1:]
        room = parts[0] if len(parts) > 1 or parts[0] in OF_THE_HOOKS else "others"
        found[room] = found.get(room, 0) + len(file.read_text().splitlines())
    return found


def test_every_room_keeps_its_budget():
    found = lines_by_room("shardcore")
    assert found.keys() == ROOMS.keys()
    assert {room: lines for room, lines in found.items() if lines > ROOMS[room]} == {}
    assert sum(found.values()) <= CORE
    assert sum(found[room] for room in OF_THE_HOOKS) <= HOOKS


@pytest.mark.parametrize("package", AROUND)
def test_what_is_around_keeps_its_budget(package):
    assert sum(lines_by_room(package).values()) <= KITS[package]


def test_budgets_are_near_what_is_there():
    """A budget that is far from what is there holds nothing."""
    found = lines_by_room("shardcore")
    assert {room: ROOMS[room] for room in ROOMS if ROOMS[room] > found[room] + 100} == {}
