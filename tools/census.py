"""Write docs/census.md: what every model class with a head in transformers comes to on two tensor-parallel ranks.

    python tools/census.py                                # measure what was not measured, and write the page
    python tools/census.py --only Qwen3Next gpt_oss       # classes or model types, also those that were measured
    python tools/census.py --minutes 30                   # as many as half an hour allows; the next run goes on
    python tools/census.py --table                        # measure nothing: write the page
    python tools/census.py --plain --results FILE         # tensor parallelism alone, in none of the further ways
    python tools/census.py --table --also FILE            # the page has the totals of another release too

A class is built with few layers and random float64 weights from its own configuration, or else as the conformance kit
of its pack does. It is sharded with its pack or else with a policy that is inferred (`policy="infer"`, from a smaller
copy of other sizes), and compared with the unsharded model: the loss, every output and every gradient. The results are
in ``.nox/census.jsonl``, one line for each class.

    the tool (torch, transformers) ── fork ──> a class: the model, the policy ── fork ──> two ranks
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import io
import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from census_page import page, totals  # from tools/
from census_ranks import RANKS, WAYS, Compared, answer_of_rank, loss_of  # from tools/
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardcore.errors import NoPolicyError, ShardcoreError
from shardcore.plugins.registry import default_registry
from shardcore_scaffold.checkpoints import configuration
from shardcore_scaffold.infer import answer
from shardcore_scaffold.inferred import policy_from
from shardcore_scaffold.rounding import change_of_gradients
from shardcore_scaffold.small import small_model
from shardcore_testing.islands import in_float64
from shardcore_testing.subject import Subject, cases_of

__all__ = ["main", "mixes_tokens", "on_ranks", "read", "run"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "census.md"
RESULTS = ROOT / ".nox" / "census.jsonl"

_FORK = multiprocessing.get_context("fork")
_ROUNDED = 1e-14  # of a loss
_TIMES = 10  # what the last bits of the weights change: the sums of ranks are rounded otherwise too
_LIMIT = 240.0  # seconds for a class
#: Sizes of the model that is compared, where they differ from those of the copy that a policy is inferred from: what is
#: right by accident in the copy is wrong here.
_SIZES = {"words": 131, "heads": 8, "width": 64, "inner": 72}


def classes() -> dict[str, str]:
    """Return the classes with a head, with their model types: first one of each type without a pack that has a plan."""
    found: dict[str, str] = {}
    for table, names in vars(modeling_auto).items():
        if table.startswith("MODEL_FOR_") and table.endswith("_MAPPING_NAMES"):
            for kind, name in names.items():
                for each in [name] if isinstance(name, str) else name:
                    found.setdefault(each, kind)
    packed = {spec.target.rpartition(".")[2] for pack in default_registry().packs for spec in pack.specs}
    first = {kind: name for name, kind in reversed(found.items())}

    def rank(name: str) -> tuple[bool, bool, bool, bool]:
        backbone = name.endswith(("Backbone", "Model", "Encoder"))
        return first[found[name]] != name, name in packed, not _planned(found[name]), backbone

    return {name: found[name] for name in sorted(found, key=rank)}


@functools.cache
def _planned(kind: str) -> bool:
    """Tell whether the configuration of a model type, or of one of its parts, has a plan for tensor parallelism."""
    if kind not in CONFIG_MAPPING:
        return False
    config = CONFIG_MAPPING[kind]
    parts = [config, *(getattr(config, "sub_configs", None) or {}).values()]
    return any(getattr(part, "base_model_tp_plan", None) for part in parts)


def measure(name: str) -> dict[str, Any]:
    """Return what one class comes to: its ``state``, with the ``reason`` or the errors."""
    cls = getattr(transformers, name)
    found: dict[str, Any] = {"blocks": has_blocks(cls)}
    model: Any
    policy, left_out = None, ""
    try:
        config = configuration(cls)
    except Exception as error:  # the class of configurations takes its own default for wrong
        return {**found, "state": "not built", "reason": f"{type(error).__name__}: {error}"}
    try:
        small = small_model(cls, config, sizes=_SIZES)
        model, inputs, left_out = small.model.requires_grad_(), small.inputs, small.left_out
    except ShardcoreError as error:
        if (case := _case_of(cls)) is None:
            state = "no library" if "ImportError: " in str(error) else "not built"
            return {**found, "state": state, "reason": str(error)}
        model, inputs = case
    try:
        found["way"] = default_registry().resolve(cls).pack.name
    except NoPolicyError:
        found["way"] = "inferred"
        try:
            told = answer(cls.__module__, name, model.config.to_json_string(use_diff=False), proved=False)
        except ShardcoreError as error:
            return {**found, "state": "refused", "reason": str(error)}
        found["doubts"] = list(dict.fromkeys(told["doubts"]))
        found["way"] += ", text" if left_out else ""
        policy = policy_from(name, told["source"])
    return found | on_ranks(model, inputs, policy)


def on_ranks(model: Any, inputs: Mapping[str, Any], policy: Any) -> dict[str, Any]:
    """Return what a small model comes to, with a policy or the one of its pack, beside the unsharded model."""
    reference = copy.deepcopy(model)
    wanted = loss_of(reference(**copy.deepcopy(inputs)))  # which some change
    if wanted.isnan():
        return {"state": "not built", "reason": "the unsharded model computes no numbers with random weights"}
    again = loss_of(copy.deepcopy(model)(**copy.deepcopy(inputs)))
    if not torch.allclose(wanted, again, rtol=_ROUNDED, atol=_ROUNDED):  # patches that are shuffled are no others
        return {"state": "random", "reason": "two calls of the unsharded model differ: it draws numbers"}
    wanted.backward()
    if not all(torch.isfinite(p.grad).all() for p in reference.parameters() if p.grad is not None):
        return {"state": "not built", "reason": "the unsharded model has gradients that are not finite"}
    with tempfile.TemporaryDirectory() as folder:
        compared = Compared(model, inputs, policy, Path(folder))
        with contextlib.suppress(Exception):  # nothing is there then
            copy.deepcopy(model).save_pretrained(compared.saved)
        ranks = [_Child(functools.partial(answer_of_rank, rank, compared)) for rank in range(RANKS)]
        answers = [child.answer(_LIMIT) for child in ranks]
    worst = max(answers, key=lambda each: (each["state"] != "exact", each.get("error", 0.0)))
    if worst["state"] == "differs" and worst["error"] <= _TIMES * (own := change_of_gradients(model, inputs)):
        why = f"weights that differ in their last bits change gradients of the unsharded model by {own:.0e}"
        return {"state": "random", "reason": why}
    if worst["state"] == "exact":  # what one rank says of a way says more than "exact"
        worst["ways"] = {way: max((each["ways"][way] for each in answers), key=_by_trouble) for way in WAYS}
    return worst


def has_blocks(cls: Any) -> bool | None:
    """Tell whether a class has modules of attention, or of what mixes tokens in its place; None if it is not built."""
    try:
        with torch.device("meta"):
            model: nn.Module = cls(configuration(cls))
    except Exception:
        return None
    return mixes_tokens(model)


def mixes_tokens(model: nn.Module) -> bool:
    """Tell whether a model has modules of attention, or of what mixes tokens in its place."""
    return any(
        re.search(r"Atten|Attn|Mixer|Mamba|Rwkv|LSTM|Fourier", type(module).__name__) for module in model.modules()
    )


def _case_of(cls: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]] | None:
    """Return a small model of a class that the conformance kit of its pack has, in evaluation, and a call of it."""
    try:
        pack = default_registry().resolve(cls).pack
    except NoPolicyError:
        return None
    for case in cases_of(pack.cases):
        subject = Subject(case=case, tp=RANKS)
        if RANKS in case.supports.tensor_parallel and type(model := subject.build()) is cls:
            return model.eval(), subject.inputs(model)
    return None


def _by_trouble(said: str) -> tuple[bool, bool]:
    return said not in ("", "exact"), said == "exact"


class _Child:
    """A forked process that tells what a function returns; ``leads``: what it forks ends with it."""

    def __init__(self, function: Callable[[], dict[str, Any]], *, leads: bool = False) -> None:
        self._pipe, theirs = _FORK.Pipe(duplex=False)
        self._process, self._leads = _FORK.Process(target=_tell, args=(function, theirs, leads)), leads
        self._process.start()
        theirs.close()

    def answer(self, limit: float) -> dict[str, Any]:
        """Return what it told, or why it told nothing, and end it."""
        found: dict[str, Any] = {"state": "failed", "reason": f"took more than {limit:.0f} s"}
        with contextlib.suppress(ProcessLookupError, EOFError):
            if self._pipe.poll(limit):
                found["reason"] = "the process died"
                found = self._pipe.recv()
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if self._leads else os.kill)(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        return found


def _tell(function: Callable[[], dict[str, Any]], pipe: Connection, leads: bool) -> None:
    if leads:
        os.setpgid(0, 0)
    with in_float64(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
        try:
            pipe.send(function())
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            pipe.send({"state": "failed", "reason": f"{type(error).__name__}: {error} ({place})"})


def run(
    names: Sequence[str],
    kinds: Mapping[str, str],
    minutes: float,
    results: Path = RESULTS,
    measure: Callable[[str], dict[str, Any]] = measure,
    release: str = transformers.__version__,
) -> None:
    """Measure classes, one after another, and append what they come to; end when the time is over."""
    results.parent.mkdir(exist_ok=True)
    end, counts = time.monotonic() + 60 * minutes, Counter[str]()
    gc.collect()
    gc.freeze()
    for at, name in enumerate(names, 1):
        if time.monotonic() > end:
            print(f"the time is over: {len(names) - at + 1} classes were not reached")
            break
        begin = time.monotonic()
        found = _Child(functools.partial(measure, name), leads=True).answer(_LIMIT)
        line = {"class": name, "type": kinds[name], "release": release, **found}
        line["seconds"] = round(time.monotonic() - begin, 1)
        counts[found["state"]] += 1
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        said = f"{found['error']:.0e} {found['split']:.2f}" if "error" in found else found["reason"][:160]
        done = ", ".join(f"{count} {state}" for state, count in counts.items())
        place = f"{at}/{len(names)} {name} {found.get('way', '')} {found['state']} {line['seconds']} s"
        print(f"{place}: {said} [{done}]", flush=True)


def read(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the newest result of each class."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {line["class"]: line for line in map(json.loads, lines)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="classes, or model types")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no class after so many")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--plain", action="store_true", help="no further ways than tensor parallelism")
    parser.add_argument("--also", type=Path, help="results of another release, whose totals the page has too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if given.plain:
        WAYS.clear()
    kinds = classes()
    if given.only:
        names = [name for name, kind in kinds.items() if {name, kind} & set(given.only)]
        names += [name for name in given.only if name not in kinds and hasattr(transformers, name)]
        kinds |= {name: name for name in names if name not in kinds}
    else:
        measured = read(given.results)
        names = [name for name in kinds if name not in measured]
    if not given.table:
        run(names, kinds, given.minutes, given.results)
    results = {name: result for name, result in read(given.results).items() if name in kinds}
    missing = len(kinds.keys() - results.keys())
    also = read(given.also) if given.also else {}
    given.page.write_text(page(results, missing, transformers.__version__, also), encoding="utf-8")
    print(totals(results, missing))


if __name__ == "__main__":
    main()
