"""Checks of the case, the plan and what sharding leaves alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import type_before_parametrizations

from shardcore.errors import AlreadyShardedError, PlanError
from shardcore.nn.layout import ReplicatedLayout
from shardcore.plan import ShardPlan
from shardcore_testing.checks_pipeline import refuses_pipeline
from shardcore_testing.checks_training import recomputed
from shardcore_testing.findings import Ledger
from shardcore_testing.subject import Subject, checkpointing, flat, meta_copy
from shardcore_transformers.holders import STANDS_FOR

#: Sizes at which every case either is compared or must refuse.
SIZES = (2, 3, 4)


def case(s: Subject, ledger: Ledger) -> None:
    """The case itself can show mistakes: nothing constant, nothing random, inputs that differ."""
    with ledger.check("case"):
        first, second = s.build(), s.build()
        values = list(first.named_parameters())
        for (name, mine), theirs in zip(values, second.parameters(), strict=True):
            ledger.true(torch.equal(mine, theirs), f"build() gives {name} other values each time")
            constant = mine.numel() > 1 and bool((mine == mine.flatten()[0]).all())
            value = "" if not constant else f"{mine.flatten()[0]:g}"
            ledger.true(not constant, f"{name} is {value} everywhere, which hides mistakes (H4); draw it at random")
        inputs = [s.inputs(first, seed) for seed in (0, 0, 1)]
        drawn = [[t for _, t in flat(batch)] for batch in inputs]
        same = [all(torch.equal(a, b) for a, b in zip(drawn[0], other, strict=True)) for other in drawn[1:]]
        ledger.true(same[0], "inputs() of one seed differ from call to call")
        ledger.true(not same[1], "inputs() of different seeds are equal")
        loss, again = (s.loss(first(**inputs[0])) for _ in range(2))
        with ledger.place("two calls of the unsharded model differ: a dropout is live in build()"):
            ledger.close("loss", loss, again)
        loss.backward()
        ledger.true(any(p.grad is not None for p in first.parameters()), "no parameter gets a gradient")


def plan(s: Subject, ledger: Ledger) -> None:
    """Every policy compiles on meta, accounts for every parameter, and splits what the case says."""
    with ledger.check("plan"):
        ledger.doing("building the model")
        model = s.build()
        ledger.doing("compiling the policy")
        made = s.plan(meta_copy(model))
        ledger.true(made.digest == s.plan(model).digest, "the plan of the model on meta is another one")
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        planned = {name for p in made.parameters for name in (p.name, *p.aliases)}
        ledger.true(names == planned, f"the plan leaves out {sorted(names ^ planned)}")
        if made.stages or s.case.supports.pipeline:
            _stages(ledger, made, model)
        if s.tp > 1:
            _splits(s, ledger, made)
            _whole_blocks(s, ledger, made, model)


def _stages(ledger: Ledger, made: ShardPlan, model: nn.Module) -> None:
    """Require stages that hold every buffer and every name of a tied weight too, which a part cannot do without."""
    if made.stages is None:
        ledger.failed("the policy has no stages=Stages(...), which say where the model can be cut")
        return
    names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    loose = [name for name in names if made.stages.holder(name) is None]
    ledger.true(
        not loose, f"the policy's stages leave out {', '.join(loose)}; name what holds it in one of their parts"
    )


def _splits(s: Subject, ledger: Ledger, made: ShardPlan) -> None:
    split = {
        name
        for p in made.parameters
        if not isinstance(p.layout, ReplicatedLayout | None)
        for name in (p.name, *p.aliases)
    }
    ledger.true(bool(split), "no parameter is split")
    for part in s.case.sharded:
        ledger.true(any(part in name for name in split), f"no parameter with {part!r} in its name is split")


def _whole_blocks(s: Subject, ledger: Ledger, made: ShardPlan, model: nn.Module) -> None:
    """Require the linears of blocks to be split, where they are large enough; replicated ones gain nothing."""
    for name in whole_linears(made, model, s.case.layers, s.tp):
        ledger.true(
            any(part in name for part in s.case.whole),
            f"the linear {name} is replicated, which gains nothing; split it, or name it in the case's whole=",
        )


def whole_linears(made: ShardPlan, model: nn.Module, layers: str, tp: int) -> Iterator[str]:
    """Yield the names of linears of blocks that are replicated, though they are large enough to be split.

    Args:
        made: the plan.
        model: the model.
        layers: a list of blocks beside those of the stages; may be empty.
        tp: the number of ranks.
    """
    layouts = {name: p.layout for p in made.parameters for name in (p.name, *p.aliases)}
    blocks = tuple(f"{name}." for name in (layers, *(made.stages.lists if made.stages else ())) if name)
    for name, linear in model.named_modules():
        replicated = name.startswith(blocks) and layouts.get(f"{name}.weight") == ReplicatedLayout()
        if not replicated or isinstance(linear, nn.Embedding) or linear.weight.ndim != 2:
            continue
        if all(len(torch.arange(size).chunk(tp)) == tp for size in linear.weight.shape):
            yield name


def sizes(s: Subject, ledger: Ledger) -> None:
    """A size that the case does not name cannot be planned, and the message says what to do."""
    with ledger.check("sizes"):
        model = meta_copy(s.build())
        closed = [size for size in SIZES if size not in s.case.supports.tensor_parallel]
        for size in closed:
            try:
                s.plan(model, size)
            except PlanError as error:
                for problem in error.problems:
                    said = bool(problem.what and problem.todo and problem.rule)
                    ledger.true(said, f"tp {size}: a problem without what, rule or a way out: {problem}")
            else:
                ledger.failed(
                    f"tp {size} can be planned, though the case does not name it; add it to Supports.tensor_parallel, "
                    "or give the policy a check that refuses it"
                )
        if not closed:
            ledger.closed(f"sizes {', '.join(map(str, SIZES))} are all supported")


def refusals(s: Subject, ledger: Ledger) -> None:
    """What the case says is refused is refused, on every rank, and changes nothing."""
    with ledger.check("refusals"):
        model = s.shard(s.build())
        try:
            s.shard(model)
        except AlreadyShardedError:
            ledger.true(True, "")
        else:
            ledger.failed("a sharded model was sharded again")
        for options in s.case.refuses:
            with ledger.place(f"build({_arguments(options)})"):
                model = s.build(**options)
                twin = copy.deepcopy(model)
                try:
                    s.shard(model)
                except PlanError:
                    same = all(
                        torch.equal(a, b) and not isinstance(b, DTensor)
                        for a, b in zip(twin.parameters(), model.parameters(), strict=True)
                    )
                    ledger.true(same, "it was refused, but parameters changed")
                    ledger.true(_classes(twin) == _classes(model), "it was refused, but modules changed their class")
                else:
                    ledger.failed("the case says that it is refused, and it was sharded")
    with ledger.check("closed"):
        _closed(s, ledger)


def _closed(s: Subject, ledger: Ledger) -> None:
    """Try what the case says is impossible."""
    attempts = list(_attempts(s))
    for name, attempt in attempts:
        try:
            attempt()
        except Exception:
            ledger.true(True, "")
        else:
            ledger.failed(f"Supports says that {name} is not supported, but it did not raise")
    if not attempts:
        ledger.closed("the case closes no capability")


def _attempts(s: Subject) -> Iterator[tuple[str, Any]]:
    supports = s.case.supports
    if not supports.flash_attention:
        yield "flash_attention", lambda: s.plan(s.build(), device_type="cuda", enable_flash_attention=True)
    if not (supports.checkpointing and supports.reentrant):

        def recompute() -> None:
            name = s.blocks(model := s.build(), s.plan(model))
            checkpointing(s.shard(model), {"use_reentrant": supports.checkpointing})
            assert any(recomputed(s, model, name)), "upstream takes the call and does nothing"

        yield "reentrant checkpointing" if supports.checkpointing else "checkpointing", recompute
    if not supports.generation:

        def generate() -> None:
            model = s.shard(s.build())
            _ = model.generate(**s.prompt(model), max_new_tokens=2, return_dict_in_generate=True).past_key_values

        yield "generation", generate
    if not supports.sequence:
        yield "sequence parallelism", lambda: s.plan(s.build(), enable_sequence_parallelism=True)
    if not supports.context:
        yield "context parallelism", lambda: s.plan(s.build(), cp=2)
    if supports.experts is not True:
        yield "expert parallelism", lambda: s.plan(s.build(), dp=2, ep=2)
    if not supports.pipeline:
        yield "pipeline parallelism", lambda: refuses_pipeline(s)
    if not supports.save_pretrained:
        yield "save_pretrained", lambda: s.shard(s.build()).save_pretrained("/dev/null/nowhere")


def identity(s: Subject, ledger: Ledger) -> None:
    """An unsharded twin is untouched, and the sharded model keeps its interface."""
    with ledger.check("twin"):
        twin = s.build().eval()
        inputs = s.inputs(twin)
        before = dict(flat(twin(**inputs)))
        kinds, methods = _classes(twin), _methods(twin)
        reference, model = s.twins()
        after = dict(flat(twin(**inputs)))
        for name, tensor in before.items():
            ledger.true(torch.equal(tensor, after[name]), f"{name} of an unsharded twin changed (H27)")
        ledger.true(_classes(twin) == kinds == _classes(s.build()), "modules of a twin changed their class (H27)")
        ledger.true(_methods(twin) == methods, "a class of a twin got other methods (H27)")
    with ledger.check("interface"):
        kind = type(reference)
        ledger.true(isinstance(model, kind), f"the sharded model is no {kind.__name__} any more")
        ledger.true(type(model).__name__ == kind.__name__, f"its class is called {type(model).__name__} now")
        same = inspect.signature(model.forward) == inspect.signature(reference.forward)
        ledger.true(same, "its forward takes other arguments")
        for (name, mine), (other, theirs) in zip(reference.named_modules(), model.named_modules(), strict=True):
            ledger.true(name == other, f"module {name} is called {other} now")
            if isinstance(mine, nn.Linear | nn.Embedding | nn.LayerNorm):
                ledger.true(isinstance(theirs, type(mine)), f"{name} is no {type(mine).__name__} any more")


def _classes(model: nn.Module) -> list[type]:
    return [type_before_parametrizations(module) for module in model.modules()]


def _methods(model: nn.Module) -> dict[str, int]:
    """Return what the classes of a model define, by identity; docs/process.md lists what shardcore puts there."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls.__module__ != "builtins"}
    return {
        f"{cls.__module__}.{cls.__qualname__}.{name}": id(getattr(value, STANDS_FOR, value))
        for cls in classes
        for name, value in vars(cls).items()
        if callable(value)
    }


def _arguments(options: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
