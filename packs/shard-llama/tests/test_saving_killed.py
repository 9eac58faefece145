"""A save over an earlier checkpoint, killed at any instant, leaves the old weights or the new; the others notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llama_cases import build, shard
from saving_files import ODD, names_in, saved
from transformers import LlamaForCausalLM

pytestmark = [pytest.mark.newest, pytest.mark.nightly]

_ONE, _FEW, _MANY = "1GB", 60_000, 20_000
_CHANGES = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "shutil.rmtree")


def _filled(value: float) -> Any:
    model = build(**ODD)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _values(folder: Path) -> set[float]:
    """Load a checkpoint as a user does, and return all values in it."""
    model = LlamaForCausalLM.from_pretrained(folder)
    return {value for parameter in model.parameters() for value in parameter.detach().unique().tolist()}


class _Copies:
    """Copies a folder before every operation on files of this process, whoever asks for it."""

    def __init__(self) -> None:
        self.folder, self.place, self.made = None, Path(), 0
        sys.addaudithook(self._see)  # stays for good, so there is one for all tests

    @contextmanager
    def of(self, folder: Path, place: Path) -> Iterator[None]:
        self.folder, self.place, self.made = folder, place, 0
        try:
            yield
        finally:
            self.folder = None

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and args[1].strip("rb") != ""
        if self.folder is None or not (writes or event in _CHANGES):
            return
        folder, self.folder = self.folder, None  # copying is no operation of the save
        shutil.copytree(folder, self.place / f"{self.made:03d}", symlinks=True)
        self.made += 1
        self.folder = folder


_KINDS = {
    "one-one": (_ONE, _ONE, True),
    "one-many": (_ONE, _MANY, True),
    "many-one": (_MANY, _ONE, True),
    "many-many": (_MANY, _MANY, True),
    "many-many-without-links": (_MANY, _MANY, False),
    "many-few": (_MANY, _FEW, True),
}


@pytest.mark.parametrize(("old", "new", "links"), _KINDS.values(), ids=_KINDS)
def test_killed_anywhere(pool, tmp_path, old, new, links):
    pool.run(_killed_anywhere, str(tmp_path), old, new, links, timeout=180)


_COPIES: list[_Copies] = []


def _no_link(*args: Any, **kwargs: Any) -> None:
    raise PermissionError("no links here")


def _killed_anywhere(folder: str, old: Any, new: Any, links: bool) -> None:
    rank, target, copies = dist.get_rank(), Path(folder, "checkpoint"), Path(folder, "copies")
    model = shard(_filled(2.0))
    if rank == 0:
        _filled(1.0).save_pretrained(target, max_shard_size=old)
    made = [0]
    with pytest.MonkeyPatch.context() as patch:
        if not links:
            patch.setattr(os, "link", _no_link)
        if rank == 0:
            _COPIES[:] = _COPIES or [_Copies()]
            with _COPIES[0].of(target, copies):
                model.save_pretrained(target, max_shard_size=new)
            made = [_COPIES[0].made]
        else:
            model.save_pretrained(target, max_shard_size=new)
    dist.broadcast_object_list(made, 0)
    assert made[0] > 5
    shard(_filled(2.0)).save_pretrained(f"{folder}/wanted", max_shard_size=new)
    if rank == 0:
        seen = [_values(copies / f"{number:03d}") for number in range(made[0])]
        turn = seen.index({2.0})
        assert seen == [{1.0}] * turn + [{2.0}] * (made[0] - turn)  # old, and from one operation on new
        assert _values(target) == {2.0}
        if links:
            assert names_in(target) == names_in(f"{folder}/wanted")
    again = shard(_filled(3.0))
    for number in (*range(0, made[0], 3), made[0] - 1):  # the next save leaves nothing of the one that was killed
        again.save_pretrained(copies / f"{number:03d}", max_shard_size=new)
        if rank == 0:
            assert {value for t in saved(copies / f"{number:03d}").values() for value in t.unique().tolist()} == {3.0}
            assert names_in(copies / f"{number:03d}") == names_in(f"{folder}/wanted")
    dist.barrier()


def test_a_writer_that_is_gone_is_named(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(_RANKS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path), str(Path(__file__).parent)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.splitlines()[-1])
    for case in ("killed", "stopped"):
        error, seconds = said[case]
        assert error.startswith("MissingRanksError: rank 1, which writes the model for all, has given no sign of life")
        assert 3 <= seconds < 15
        assert _values(tmp_path / case) == {1.0}
    assert said["slow"][0] == "saved"  # twice as long as the timeout, but alive
    assert _values(tmp_path / "slow") == {2.0}
    assert said["killed by the pivot"][0].startswith("MissingRanksError")
    assert _values(tmp_path / "killed by the pivot") == {2.0}


# Forked, because importing takes most of the time. The store is a file, which outlives every rank.
_RANKS = """
import datetime, json, os, signal, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[2])
import torch
import torch.distributed as dist
from llama_cases import build, shard
from test_saving_killed import _MANY, _filled

import shardcore
from shardcore_transformers import _saving

root = Path(sys.argv[1])


def run(case, rank, answer):
    limit = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", init_method=f"file://{root}/{case}.store", rank=rank, world_size=2, timeout=limit)
    model, save, calls = shard(_filled(2.0)), _saving.save_file, []

    def save_file(*args, **kwargs):
        save(*args, **kwargs)
        calls.append(args)
        if len(calls) == 2 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 2 and case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if len(calls) == 2 and case == "slow":
            time.sleep(8)

    def sees(event, args):
        if event == "os.remove" and case == "killed by the pivot" and str(args[0]).endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        _saving.save_file = save_file
        sys.addaudithook(sees)
    begun = time.monotonic()
    try:
        model.save_pretrained(root / case, is_main_process=rank == 1, max_shard_size=_MANY)
        said = "saved"
    except shardcore.ShardcoreError as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 0:
        os.write(answer, json.dumps([said, time.monotonic() - begun]).encode())
    os._exit(0)


said = {}
for case in ("killed", "stopped", "slow", "killed by the pivot"):
    _filled(1.0).save_pretrained(root / case, max_shard_size=60_000)
    read, write = os.pipe()
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            run(case, rank, write)
    os.waitpid(ranks[0], 0)
    if case != "slow":
        os.kill(ranks[1], signal.SIGKILL)
    os.waitpid(ranks[1], 0)
    said[case] = json.loads(os.read(read, 10_000))
print(json.dumps(said))
"""
