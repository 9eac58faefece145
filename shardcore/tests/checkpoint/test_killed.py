"""A save that is killed at any instant leaves the earlier checkpoint or the new one; the other ranks notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from trainings import Training, largest

from shardcore.errors import ShardcoreWarning

pytestmark = pytest.mark.nightly

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


class Copies:
    """Copies a folder before every operation on files of this process."""

    def __init__(self):
        self.folder, self.place, self.made = None, None, 0
        sys.addaudithook(self._see)  # stays for good

    def _see(self, event, args):
        writes = event == "open" and isinstance(args[1], str) and args[1].strip("rb") != ""
        if self.folder is None or not (writes or event in _CHANGES):
            return
        folder, self.folder = self.folder, None  # copying is no operation of the save
        shutil.copytree(folder, f"{self.place}/{self.made}")
        self.made += 1
        self.folder = folder


_COPIES: list[Copies] = []


def killed_anywhere(folder):
    """Look at what there is before each operation of the first rank, which is what a kill would leave."""
    target, place = f"{folder}/checkpoints", f"{folder}/copies"
    training = Training({"tp": 2}, steps=1)
    training.save(target, step=0)
    training.save(target, step=1)
    old = training.values()
    new = training.run([1]).values()
    made = [0]
    if dist.get_rank() == 0:
        _COPIES[:] = _COPIES or [Copies()]
        _COPIES[0].folder, _COPIES[0].place = target, place
        training.save(target, step=2, keep_last=1)
        made, _COPIES[0].folder = [_COPIES[0].made], None
    else:
        training.save(target, step=2, keep_last=1)
    dist.broadcast_object_list(made, 0)
    assert made[0] > 8
    seen = []
    again = Training({"tp": 2}, seed=7)
    for number in range(made[0]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcoreWarning)
            step = again.load(f"{place}/{number}").step
        if number % 4 == 0 or step not in seen:
            assert largest(again.values(), old if step == 1 else new) == 0
        seen.append(step)
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}
    names = sorted(path.name for path in Path(target).iterdir())
    assert names == ["step-2"]


def test_the_first_rank_anywhere(pool, tmp_path):
    pool.run(killed_anywhere, str(tmp_path), timeout=120)


def test_any_rank(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(_RANKS)
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(support)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    for case, (error, seconds, step) in said.items():
        if case != "after the name":
            assert error.startswith("MissingRanksError: a checkpoint is saved and loaded by all ranks"), case
            assert step == 0, case
            assert seconds < 20
    assert said["after the name"][2] == 1


# Forked, because importing takes most of the time.
_RANKS = """
import json, os, signal, sys, time, warnings
sys.path.insert(0, sys.argv[2])
import pytest
import torch.distributed as dist
from trainings import Training
import shardcore

CASES = {
    "before its part": (1, lambda event, args: event == "open" and "__1_0" in str(args[0])),
    "before its own file": (1, lambda event, args: event == "open" and "rank-1" in str(args[0])),
    "before the list": (0, lambda event, args: event == "open" and ".metadata.tmp" in str(args[0])),
    "before the index": (0, lambda event, args: event == "open" and args[1] == "x" and "core.json" in str(args[0])),
    "before the name": (0, lambda event, args: event == "os.rename" and str(args[1]).endswith("step-1")),
    "after the name": (0, lambda event, args: event == "open" and not isinstance(args[1], str) and named(args[0])),
}


def named(path):  # the folder is synced after the checkpoint has its name
    return os.path.exists(f"{path}/step-1")


def run(case, rank, answer):
    folder = f"{sys.argv[1]}/{case}"
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
    training = Training({"tp": 2}, steps=1)
    training.save(folder, step=0)
    victim, when = CASES[case]
    if rank == victim:
        sys.addaudithook(lambda event, args: when(event, args) and os.kill(os.getpid(), signal.SIGKILL))
    begun, said = time.monotonic(), "saved"
    try:
        training.save(folder, step=1)
    except shardcore.ShardcoreError as error:
        said = f"{type(error).__name__}: {error}"
    os.write(answer, json.dumps([said, time.monotonic() - begun]).encode())
    os._exit(0)


said = {}
warnings.simplefilter("ignore")
for case, (victim, _) in CASES.items():
    read, write = os.pipe()
    children = []
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            run(case, rank, write)
    for child in children:
        os.waitpid(child, 0)
    text = os.read(read, 10_000).decode()
    found = json.JSONDecoder().raw_decode(text)[0]
    training = Training(seed=7)
    loaded = training.load(f"{sys.argv[1]}/{case}")
    said[case] = [*found, loaded.step]
print(json.dumps(said))
"""
