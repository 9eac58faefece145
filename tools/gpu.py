"""The conformance kit on the cards of this machine, in parts: ``nox -s gpu``, or this file where torch and packs are.

    python tools/gpu.py                               # every part, as many at a time as there are cores for
    python tools/gpu.py kit-1 kit-2 --results FOLDER  # some; a part that passed with the same sources is passed over
    python tools/gpu.py streams                       # 200 random steps, twice: do their bits depend on the time?

The kit's quick run at two ranks, NCCL between them, in float64 and with the bounds that it has on CPUs. Ranks share the
cards if there are fewer: that is right, and slow. The part ``streams`` is `gpu_streams`, which runs alone, at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gpu_streams import compare
from packaging.requirements import Requirement

from cells import Pack, find_packs  # from tools/
from results import Result, Results, digest_of

ROOT = Path(__file__).parents[1]
#: How many parts the packs are dealt out to; in a part, a mechanism is tried once.
_PARTS = 5
_CORES = 3  # of a part: two ranks, and the process that asks them
_STREAMS = "streams"

__all__ = ["main", "parts"]


def parts() -> dict[str, list[Path]]:
    """Return the tests of each part; packs with many lie in different ones, and those for a newer torch in none."""
    packs = filter(_fits, find_packs(ROOT))
    kits = sorted((pack.folder / "tests" / "test_conformance.py" for pack in packs), key=_weight)
    return {f"kit-{index + 1}": kits[index::_PARTS] for index in range(_PARTS)}


def _fits(pack: Pack) -> bool:
    needed = map(Requirement, pack.dependencies)
    return all(r.specifier.contains(version(r.name), prereleases=True) for r in needed if r.name == "torch")


def _weight(kit: Path) -> int:
    return sum(len(file.read_text()) for file in kit.parents[1].glob("src/*/cases.py"))


def _run(part: str, tests: Sequence[Path], given: argparse.Namespace, results: Results) -> Result:
    """Run a part, unless it passed before, and keep its result."""
    device: str = given.device
    sources = f"{digest_of([ROOT / 'shardcore' / 'src', ROOT / 'packs'])} {device}"
    if part == _STREAMS:
        sources += f" {digest_of([ROOT / 'tools'])} {given.steps}"
    name = f"{device}-{part}"
    if results.passed_before(name, sources):
        return next(result for result in results.all() if result.name == name)
    start = time.monotonic()
    if part == _STREAMS:
        result = _compare_streams(name, given, results, sources)
    else:
        result = _test(name, tests, given.device, results, sources)
    result = replace(result, seconds=round(time.monotonic() - start, 1))
    results.write(result)
    return result


def _compare_streams(name: str, given: argparse.Namespace, results: Results, sources: str) -> Result:
    found = compare(given.device, given.steps, results.folder)
    return Result(
        name=name,
        suite=_STREAMS,
        against=given.device,
        passed=len(found.passed),
        failed=len(found.failures),
        failures=found.failures,
        skipped=dict.fromkeys(found.skipped, 1),
        sources=sources,
    )


def _test(name: str, tests: Sequence[Path], device: str, results: Results, sources: str) -> Result:
    report, lines = (results.folder / f"{name}.{end}" for end in ("xml", "jsonl"))
    for file in (report, lines):
        file.unlink(missing_ok=True)
    written = [f"--junitxml={report}", "-p", "outcomes", f"--outcomes={lines}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--quick", f"--device={device}", *written, *map(str, tests)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT / "tools"))))
    with (results.folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    success, part = done.returncode == 0, name.removeprefix(f"{device}-")
    return Result.of(
        report, success=success, seconds=0.0, lines=lines, name=name, suite=part, against=device, sources=sources
    )


def _tell(result: Result) -> int:
    """Print a result, and return how many tests failed."""
    print(f"{result.name}: {result}, {result.seconds:.0f} s", flush=True)
    for test, why in result.failures.items():
        print(f"    {test}: {why}", flush=True)
    if result.suite == _STREAMS:
        for why in result.skipped:
            print(f"    skipped: {why}", flush=True)
    return result.failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts from the command line; the exit status is 1 if a test failed."""
    known = {**parts(), _STREAMS: []}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--device", default="cuda", help="what ranks compute on (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // _CORES), help="parts at a time")
    parser.add_argument("--steps", type=int, default=200, help="of the part streams (default: %(default)s)")
    folder = ROOT / ".nox" / "results"
    parser.add_argument("--results", type=Path, default=folder, help="where results are kept (default: .nox/results)")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    given.results.mkdir(parents=True, exist_ok=True)
    results, failed = Results(given.results.resolve()), 0
    asked = list(given.parts or known)
    with ThreadPoolExecutor(given.jobs) as several:
        kits = [several.submit(_run, part, known[part], given, results) for part in asked if part != _STREAMS]
        for each in kits:
            failed += _tell(each.result())
    if _STREAMS in asked:
        failed += _tell(_run(_STREAMS, (), given, results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
