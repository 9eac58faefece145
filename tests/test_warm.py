"""Processes that are forked by servers, as those that run pytest for recorded mistakes are."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from warm import Forked, servers  # noqa: E402  # from tools/


@pytest.fixture(scope="module")
def warm():
    with servers(["json"], ranks=1, env=os.environ) as folder:
        yield folder


def ended(server: Path, call: str, **options: object) -> tuple[int, str]:
    """Return the exit status of a forked process, and what it said."""
    ours, theirs = os.pipe()
    process = Forked(server, exec, call, output=(theirs, theirs), **options)
    os.close(theirs)
    process.join(10)
    with os.fdopen(ours) as said:
        return process.exitcode, said.read()


def test_it_is_as_one_that_was_started_there(warm, tmp_path):
    what = "'json' in sys.modules, sys.path[0], os.getcwd(), dict(os.environ)"
    call = f"import os, sys; print({what}, flush=True); os._exit(3)"
    status, said = ended(warm / "main", call, path=["here"], env={"A": "b"}, cwd=tmp_path)
    assert said == f"True here {tmp_path} {{'A': 'b'}}\n"
    assert status == 3


def test_how_it_ends_is_told(warm):
    assert ended(warm / "main", "pass")[0] == 0
    status, said = ended(warm / "main", "1 / 0")
    assert status == os.EX_SOFTWARE  # which is none of pytest's: a test that failed is another thing
    assert "ZeroDivisionError" in said
    assert ended(warm / "main", "import os; os.kill(os.getpid(), 9)")[0] == -9


def test_every_rank_has_the_hash_seed_of_its_server(warm):
    call = "print(hash('a'))"
    assert ended(warm / "0", call) == ended(warm / "0", call) != ended(warm / "main", call)


def test_it_ends_with_whoever_asked(warm):
    ours, theirs = os.pipe()
    process = Forked(warm / "main", exec, "import time; time.sleep(60)", output=(theirs, theirs))
    os.close(theirs)
    start = time.monotonic()
    del process
    with os.fdopen(ours) as said:
        assert said.read() == ""  # at its end: nobody holds it
    assert time.monotonic() - start < 10


def test_it_can_be_ended_at_once(warm):
    """However little of it has run yet."""
    for _ in range(30):
        process = Forked(warm / "main", exec, "import time; time.sleep(60)")
        process.kill()
        process.join(10)
        assert process.exitcode == -9
