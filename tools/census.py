"""Write docs/census.md: what every model class with a head in transformers comes to on two tensor-parallel ranks.

    python tools/census.py                                # measure what was not measured, and write the page
    python tools/census.py --only Qwen3Next gpt_oss       # classes or model types, also those that were measured
    python tools/census.py --minutes 30                   # as many as half an hour allows; the next run goes on
    python tools/census.py --table                        # measure nothing: write the page

A class is built with few layers and random float64 weights from its own configuration, sharded with its pack or else
with a policy that is inferred (`policy="infer"`, from a smaller copy of other sizes), and compared with the unsharded
model: the loss, every output and every gradient. The results are in ``.nox/census.jsonl``, one line for each class.

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
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardcore import shard
from shardcore.errors import NoPolicyError, ShardcoreError
from shardcore.plugins.registry import default_registry
from shardcore_scaffold.infer import answer
from shardcore_scaffold.inferred import policy_from
from shardcore_scaffold.small import small_model
from shardcore_testing.islands import no_float32_islands

__all__ = ["main", "page", "totals"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "census.md"
RESULTS = ROOT / ".nox" / "census.jsonl"

_FORK = multiprocessing.get_context("fork")
_RANKS = 2
_LIMIT = 120.0  # seconds for a class
_MOST = 0.5  # of the parameters of attention modules
_BOUND = 1e-10  # of the largest entry: what is larger is a difference and no rounding
#: Sizes of the model that is compared, where they differ from those of the copy that a policy is inferred from: what is
#: right by accident in the copy is wrong here.
_SIZES = {"words": 131, "heads": 8, "width": 64, "inner": 72}

_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
#: Switches that the checkpoints of a model type have, and the default of its configuration lacks: it cannot be called.
_SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4v_text": _MROPE,
    "granitemoehybrid": {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 26]},
    "lfm2_moe": {"layer_types": [*["conv"] * 2, "full_attention", *["conv"] * 29]},
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
}

_HEADER = """# Census of transformers

Model classes with a head in transformers {release}, with few layers and random float64 weights, sharded over two
tensor-parallel ranks beside the same model unsharded. What is compared is the loss, every output and every gradient of
one call. A class that no pack serves is sharded by `policy="infer"`, whose policy is found on a copy of other sizes
than those of the model that is compared. The proof that `infer` runs by default is not part of it: it trains too, and
refuses some of these classes.

{totals}

* **way**: the pack that serves the class, or `inferred`; *text* where the class takes images or sounds too, and no call
  with them is known to the tool: what only they reach is whole on each rank.
* **error**: the largest difference, relative to the largest gradient, or to the loss.
* **split**: the share of the small model's parameters of which a rank holds a part; **attention**: the same of those
  that attention modules hold. Tables are large in small models: these shares say little of a large one.

`nox -s census` measures the classes that are missing here, and writes this page.
"""
_STATES = {
    "exact": "are exact",
    "differs": "differ",
    "refused": "are refused with a reason before anything is changed",
    "not built": "could not be built or called here",
    "random": "draw numbers, so that two calls of the unsharded model differ",
    "failed": "ended otherwise, as the table says",
}
_SHORT = 240  # characters of a reason


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
    try:
        small = small_model(cls, _configuration(cls), sizes=_SIZES)
    except ShardcoreError as error:
        return {"state": "not built", "reason": str(error)}
    model, inputs, policy = small.model.requires_grad_(), small.inputs, None
    found: dict[str, Any] = {}
    try:
        found["way"] = default_registry().resolve(cls).pack.name
    except NoPolicyError:
        found["way"] = "inferred"
        try:
            told = answer(cls.__module__, name, model.config.to_json_string(use_diff=False), proved=False)
        except ShardcoreError as error:
            return {**found, "state": "refused", "reason": str(error)}
        found["doubts"] = list(dict.fromkeys(told["doubts"]))
        found["way"] += ", text" if small.left_out else ""
        policy = policy_from(name, told["source"])
    reference = copy.deepcopy(model)
    wanted = _loss(reference(**copy.deepcopy(inputs)))  # which some change
    if not torch.equal(wanted, _loss(copy.deepcopy(model)(**copy.deepcopy(inputs)))):
        return {**found, "state": "random", "reason": "two calls of the unsharded model differ: it draws numbers"}
    wanted.backward()
    if not all(torch.isfinite(p.grad).all() for p in reference.parameters() if p.grad is not None):
        return {**found, "state": "not built", "reason": "the unsharded model has gradients that are not finite"}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            _Child(functools.partial(_on_rank, rank, store, model, inputs, policy, reference, wanted.detach()))
            for rank in range(_RANKS)
        ]
        answers = [child.answer(_LIMIT) for child in ranks]
    return found | max(answers, key=lambda each: (each["state"] != "exact", each.get("error", 0.0)))


def _configuration(cls: Any) -> Any:
    config = cls.config_class()
    for part in (config, getattr(config, "text_config", None)):
        given = _SETTINGS.get(getattr(part, "model_type", ""), {})
        if part is not None and given:
            fresh = type(part)(**given)
            config = fresh if part is config else type(config)(text_config=fresh.to_dict())
    return config


def _loss(out: Any) -> Tensor:
    """Return a weighted sum of all that a model returned, its own loss included."""
    generator = torch.Generator().manual_seed(5)
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    weights = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves]
    return torch.stack([(leaf * weight).mean() for leaf, weight in zip(leaves, weights, strict=True)]).sum()


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value, which is infinite if there is no number."""
    return float(tensor.abs().max().nan_to_num(nan=torch.inf)) if tensor.numel() else 0.0


def _on_rank(
    rank: int, store: str, model: Any, inputs: Any, policy: Any, reference: nn.Module, wanted: Tensor
) -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.FileStore(store, _RANKS), rank=rank, world_size=_RANKS)
    try:
        sharded = shard(model, tp=_RANKS, policy=policy)
    except ShardcoreError as error:
        return {"state": "refused", "reason": str(error)}
    got = _loss(sharded(**inputs))
    got.backward()
    errors = {"loss": _largest((got - wanted) / wanted.abs().clamp_min(1.0))}
    mine, sizes, scale = dict(sharded.named_parameters(remove_duplicate=False)), Counter[str](), 0.0
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        own = mine[name]
        part = own.to_local() if isinstance(own, DTensor) else own
        kind = "attention" if "att" in name.lower() else "rest"
        sizes[kind] += parameter.numel()
        sizes[f"{kind} split"] += parameter.numel() * (part.numel() < parameter.numel())
        if (own.grad is None) != (parameter.grad is None):
            return {"state": "differs", "reason": f"{name}: one has a gradient, and the other has none"}
        if parameter.grad is not None:
            whole = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
            scale = max(scale, _largest(parameter.grad))
            errors[name] = _largest(whole - parameter.grad)
    errors = {name: error if name == "loss" else error / (scale or 1.0) for name, error in errors.items()}
    worst = max(errors, key=errors.__getitem__)
    split, attention = sizes["attention split"] + sizes["rest split"], sizes["attention"]
    found = {
        "error": errors[worst],
        "split": split / (attention + sizes["rest"]),
        "attention": sizes["attention split"] / attention if attention else None,
    }
    if errors[worst] > _BOUND:
        return {**found, "state": "differs", "reason": f"{worst} is off by {errors[worst]:.0e}"}
    return {**found, "state": "exact"}


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
    with no_float32_islands(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
        try:
            pipe.send(function())
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            pipe.send({"state": "failed", "reason": f"{type(error).__name__}: {error} ({place})"})


def run(names: Sequence[str], kinds: Mapping[str, str], minutes: float, results: Path = RESULTS) -> None:
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
        line = {"class": name, "type": kinds[name], **found, "seconds": round(time.monotonic() - begin, 1)}
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


def totals(results: Mapping[str, Mapping[str, Any]], missing: int) -> str:
    """Return the numbers in words; ``missing`` classes have no result."""
    counts = Counter(result["state"] for result in results.values())
    exact = [result for result in results.values() if result["state"] == "exact"]
    attending = [result for result in exact if result["attention"] is not None]
    split = sum(result["attention"] > _MOST for result in attending)
    said = [f"{counts[state]} {words}" for state, words in _STATES.items() if counts[state] or state == "differs"]
    inferred = sum(result["way"].startswith("inferred") for result in exact)
    return (
        f"Of {len(results) + missing} classes {len(results)} were measured: {', '.join(said)}; {missing} were not "
        f"reached. Of the {len(exact)} exact ones {inferred} have no pack; of the {len(attending)} with attention "
        f"modules {split} have more than half of their parameters split."
    )


def page(results: Mapping[str, Mapping[str, Any]], missing: int, release: str) -> str:
    """Return the page: the totals, and a row for each class."""
    lines = [_HEADER.format(release=release, totals=totals(results, missing))]
    lines += ["| class | way | error | split | attention |", "|---" * 5 + "|"]
    others = ["", "## Not exact", "", "| class | way | | why |", "|---" * 4 + "|"]
    for name, result in sorted(results.items()):
        way = result.get("way", "")
        if result["state"] == "exact":
            attention = "" if result["attention"] is None else f"{result['attention']:.2f}"
            lines.append(f"| `{name}` | {way} | {result['error']:.0e} | {result['split']:.2f} | {attention} |")
        else:
            why = " ".join(result["reason"].split()).replace("|", "/")
            why = why if len(why) <= _SHORT else f"{why[:_SHORT]} ..."
            others.append(f"| `{name}` | {way} | {result['state']} | `{why.replace('`', '')}` |")
    return "\n".join([*lines, *others, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="classes, or model types")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no class after so many")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
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
    PAGE.write_text(page(results, missing, transformers.__version__), encoding="utf-8")
    print(totals(results, missing))


if __name__ == "__main__":
    main()
