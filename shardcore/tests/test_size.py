"""How large each room may be: a budget of lines, raised only by a commit that says why."""

from __future__ import annotations

import pytest
from packages import AROUND, files_of

#: Room of the core -> the most lines. Files beside the rooms are "others".
ROOMS = {
    "agree": 810,
    "apply": 1130,
    "checkpoint": 2120,
    "comm": 2020,
    "compile": 1470,
    "config": 680,
    "fsdp": 690,
    "hooks": 310,
    "mesh": 1040,
    "nn": 9320,
    "others": 2440,
    "pipeline": 2990,
    "plan": 2020,
    "plugins": 860,
    "policy": 310,
    "styles": 2210,
    "weights": 1770,
}
#: Package around the core -> the most lines.
KITS = {
    "shardcore_shardformer": 2400,
    "shardcore_transformers": 2700,
    "shardcore_bitsandbytes": 450,
    "shardcore_peft": 2350,
    "shardcore_trainer": 2050,
    "shardcore_cli": 900,
    "shardcore_debug": 150,
    "shardcore_planner": 4220,
    "shardcore_testing": 5500,
    "shardcore_scaffold": 4070,
}
#: All of the core, and of its rooms those that define the hooks; decided in docs/adr/0037-what-is-around-the-core.md.
CORE = 32120
HOOKS = 21330
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
