"""Whether what ranks compute depends on when the device does it: ``tools/gpu.py streams``.

    python tools/gpu_streams.py FILE --device cuda --steps 200

Steps of random small Llamas, on two ranks or four: tensor parallelism, sequence parallelism and two replicas by chance,
in float32 and bfloat16. They are run twice, in new processes: as they are, and with ``CUDA_LAUNCH_BLOCKING=1``, where
no kernel overlaps another. A kernel that reads what a stream has not written yet gives other bits in one of the two.
Where NVIDIA's compute-sanitizer is on the path, a few steps run under its memcheck too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Verdict", "compare", "first_difference", "main"]

_EACH = 8  # steps of one model
_CHECKED = 5  # steps under the sanitizer
_LIMIT = 230.0  # seconds for all of it
_OVERFLOW = 99  # the sanitizer's exit status where it found something


@dataclass(kw_only=True)
class Verdict:
    """What the runs came to.

    Attributes:
        passed: what held.
        failures: what did not -> why.
        skipped: why something was not tried.
    """

    passed: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def compare(device: str, steps: int, folder: Path, *, ranks: int = 4, limit: float = _LIMIT) -> Verdict:
    """Run the steps twice and compare all bits, and some of them under the sanitizer.

    Args:
        device: what ranks compute on.
        steps: how many steps.
        folder: where the two files and what the runs print are kept.
        ranks: the most ranks; two replicas need four.
        limit: seconds for all of it.
    """
    verdict, ends = Verdict(), time.monotonic() + limit
    runs = {"as it is": {}, "blocking": {"CUDA_LAUNCH_BLOCKING": "1"}}
    files = {name: folder / f"{device}-streams-{name.replace(' ', '-')}.jsonl" for name in runs}
    for name, env in runs.items():
        command = _command(files[name], device, steps, ranks)
        if failure := _run(command, env, files[name].with_suffix(".log"), ends):
            verdict.failures[f"the run {name}"] = failure
            return verdict
    told = f"the same bits, {steps} steps"
    if difference := first_difference(*files.values()):
        verdict.failures[told] = difference
    else:
        verdict.passed.append(told)
    _sanitize(verdict, device, folder, ends)
    return verdict


def _sanitize(verdict: Verdict, device: str, folder: Path, ends: float) -> None:
    tool = shutil.which("compute-sanitizer") if device == "cuda" else None
    if tool is None:
        verdict.skipped.append("compute-sanitizer is for cuda, and is not on the path here")
        return
    file = folder / f"{device}-streams-sanitizer.jsonl"
    options = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", str(_OVERFLOW)]
    failure = _run([*options, *_command(file, device, _CHECKED, 2)], {}, file.with_suffix(".log"), ends)
    lines = file.with_suffix(".log").read_text(errors="replace").splitlines()
    said = [line.strip("= ") for line in lines if "ERROR SUMMARY" in line]
    told = f"memcheck, {_CHECKED} steps"
    if errors := [line for line in said if not line.startswith("ERROR SUMMARY: 0 errors")]:
        verdict.failures[told] = errors[0]  # of any process
    elif failure is not None:
        verdict.skipped.append(f"compute-sanitizer came to no verdict: {failure}")
    else:
        verdict.passed.append(f"{told}: {said[0]}" if said else told)


def _command(file: Path, device: str, steps: int, ranks: int) -> list[str]:
    return [
        sys.executable,
        str(Path(__file__)),
        str(file),
        f"--device={device}",
        f"--steps={steps}",
        f"--ranks={ranks}",
    ]


def _run(command: list[str], env: dict[str, str], log: Path, ends: float) -> str | None:
    """Run a command until ``ends``, and return what went wrong, in one line."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    with log.open("w") as written:
        try:
            done = subprocess.run(
                command,
                env=given,
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, ends - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "it had not ended when the time of this part was over"
    if done.returncode == 0:
        return None
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "no output")


def first_difference(one: Path, other: Path) -> str | None:
    """Return where two files differ first, in one line; None where they are the same."""
    if one.read_bytes() == other.read_bytes():
        return None
    lines = [file.read_text().splitlines() for file in (one, other)]
    for first, second in zip(*lines, strict=False):
        if first == second:
            continue
        a, b = json.loads(first), json.loads(second)
        names = [name for name, found in a["gradients"].items() if b["gradients"].get(name) != found]
        what = "the loss" if a["loss"] != b["loss"] else f"the gradient of {names[0]}" if names else "what was drawn"
        more = f" and {len(names) - 1} more" if len(names) > 1 and what != "the loss" else ""
        return f"model {a['model']}, step {a['step']}, rank {a['rank']}: {what}{more}; {a['drawn']}"
    return f"{len(lines[0])} and {len(lines[1])} lines"


def _lines(device: str, steps: int, ranks: int, seed: int) -> Iterator[str]:
    from gpu_ranks import draw, train  # by a name that ranks can import

    from shardcore_testing.pool import WorkerPool

    with WorkerPool(size=ranks, device=device) as pool:
        for index, first in enumerate(range(0, steps, _EACH)):
            drawn = draw(seed + index, min(_EACH, steps - first), ranks)
            found = pool.run(train, drawn, seed + index, world=drawn.world, timeout=120)
            for rank, of_rank in enumerate(found):
                for step, numbers in enumerate(of_rank):
                    yield json.dumps({"model": index, "step": step, "rank": rank, "drawn": str(drawn), **numbers})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps once, and write what they came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where a line for each step of each rank is written")
    parser.add_argument("--device", default="cuda", help="what ranks compute on (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="the most of them (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn (default: %(default)s)")
    given = parser.parse_args(arguments)
    with given.file.open("w") as file:
        file.writelines(f"{line}\n" for line in _lines(given.device, given.steps, given.ranks, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
