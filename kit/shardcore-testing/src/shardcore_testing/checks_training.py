"""Checks of numbers: forward, loss, every gradient, accumulation, clipping, optimizer steps, checkpointing, cost."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.errors import PlanError
from shardcore_planner.communication import gathers_of_heads
from shardcore_testing.findings import Ledger
from shardcore_testing.observing import Collectives, calls_of_leaves
from shardcore_testing.parity import gradient_errors, parameter_errors, part_of, whole
from shardcore_testing.subject import Subject, adamw, checkpointing, flat


def training(s: Subject, ledger: Ledger) -> None:
    """Train beside the unsharded model, with two micro-batches for each step, and call both once more.

    Without steps the gradients of one micro-batch are compared.
    """
    ledger.doing("building and sharding the model")
    reference, model = s.twins()
    _names(s, ledger, reference, model)
    _ties(ledger, reference, model)
    _evaluate(s, ledger, reference, model)
    if not s.steps:
        compare(s, ledger, reference, model, 0, "gradients")
        for check in STEPS:
            ledger.closed("no step is compared", check)
        return
    optimizers = [adamw(m) for m in (reference, model)]
    for step in range(s.steps):
        for micro in range(2):
            with ledger.place(f"step {step}"):
                compare(s, ledger, reference, model, 2 * step + micro, "accumulation" if micro else "gradients")
        with ledger.check("clipping"):
            _clip(ledger, reference, model)
        with ledger.check("optimizer"):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            ledger.errors(parameter_errors(reference, model))
    with ledger.check("forward"), ledger.place("after the last step"), torch.no_grad():
        inputs = s.inputs(reference, 2 * s.steps)
        outputs(s, ledger, reference(**inputs), model(**inputs))
    _names(s, ledger, reference, model)
    _ties(ledger, reference, model)


def compare(s: Subject, ledger: Ledger, reference: Any, model: Any, seed: int, check: str) -> None:
    """Run both on one batch, compare outputs and loss, run both backwards, compare every gradient."""
    inputs = s.inputs(reference, seed)
    with ledger.check("forward"):
        wanted, got = reference(**inputs), model(**inputs)
        outputs(s, ledger, wanted, got)
    with ledger.check("loss"):
        losses = s.loss(wanted), s.loss(got)
        ledger.close("loss", *losses)
    with ledger.check(check):
        for loss in losses:
            loss.backward()
        ledger.errors(gradient_errors(reference, model))


def outputs(s: Subject, ledger: Ledger, wanted: Any, got: Any) -> None:
    """Compare everything that two calls returned."""
    ledger.true(type(wanted) is type(got), f"a {type(got).__name__} was returned, not a {type(wanted).__name__}")
    mine, theirs = dict(flat(wanted)), dict(flat(got))
    for name in s.case.outputs:
        found = any(key.split(".")[0].split("[")[0] == name for key in mine)
        ledger.true(found, f"the unsharded model returned no {name}")
    if s.fields.get("parallel_output"):  # logits may be DTensors, or not there at all
        theirs = {name: whole(tensor) for name, tensor in theirs.items()}
        if s.fields.get("loss_chunk_size"):
            mine = {name: tensor for name, tensor in mine.items() if name in theirs}
            ledger.true("loss" in mine, "there is no loss")
    ledger.true(mine.keys() == theirs.keys(), f"returned were {list(theirs)}, wanted {list(mine)}")
    for name in mine.keys() & theirs.keys():
        ledger.close(name, mine[name], theirs[name])


def _evaluate(s: Subject, ledger: Ledger, reference: Any, model: Any) -> None:
    """Compare outputs in evaluation, with the padding mask and without it (H12)."""
    with ledger.check("forward"), torch.no_grad():
        inputs = s.inputs(reference)
        masks = [n for n, v in inputs.items() if n.endswith("attention_mask") and isinstance(v, Tensor)]
        for m in (reference, model):
            m.eval()
        for left_out in ([], masks) if masks else ([],):
            with ledger.place(f"evaluation without {', '.join(left_out)}" if left_out else "evaluation"):
                call = {name: value for name, value in inputs.items() if name not in left_out}
                try:
                    wanted = reference(**call)
                except Exception:
                    if not left_out:
                        raise
                    continue  # what the unsharded model cannot do is not asked of the sharded one
                outputs(s, ledger, wanted, model(**call))
        for m in (reference, model):
            m.train()


def _names(s: Subject, ledger: Ledger, reference: Any, model: Any) -> None:
    """Compare names with the unsharded model's, and require every parameter to be a DTensor with something in it."""
    with ledger.check("names"):
        for listed in ("named_parameters", "named_buffers", "named_modules"):
            wanted, got = ([name for name, _ in getattr(m, listed)()] for m in (reference, model))
            lost, new = [n for n in wanted if n not in got], [n for n in got if n not in wanted]
            ledger.true(wanted == got, f"{listed}() lost {lost} and got {new} (H42)")
        wanted, got = reference.state_dict(), model.state_dict()
        ledger.true(list(wanted) == list(got), f"state_dict() differs in {sorted(wanted.keys() ^ got.keys())}")
        theirs = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            if (other := theirs.get(name)) is None:
                continue
            ledger.true(parameter.shape == other.shape, f"{name} has shape {tuple(other.shape)} now (H10)")
            ledger.true(parameter.requires_grad == other.requires_grad, f"{name} changed requires_grad")
            by_fsdp = "cp" in s.fields  # which leaves a rank nothing where there is less than a row for each
            if s.tp == 1 and not by_fsdp:
                ledger.true(not isinstance(other, DTensor), f"{name} is a DTensor on one rank")
            elif ledger.true(isinstance(other, DTensor), f"{name} is a plain {type(other).__name__} (H8, H19)"):
                ledger.true(by_fsdp or part_of(other).numel() > 0, f"{name} has an empty part (H41)")


def _ties(ledger: Ledger, reference: Any, model: Any) -> None:
    """Require the names of one parameter to be names of one parameter still."""
    with ledger.check("ties"):
        mine = dict(reference.named_parameters(remove_duplicate=False))
        theirs = dict(model.named_parameters(remove_duplicate=False))
        shared: dict[int, list[str]] = {}
        for name, parameter in mine.items():
            shared.setdefault(id(parameter), []).append(name)
        for names in shared.values():
            kept = {id(theirs.get(name)) for name in names}
            ledger.true(len(kept) == 1, f"{', '.join(names)} are no longer one parameter (H15)")
        ledger.true(
            len({id(p) for p in theirs.values()}) == len(shared), "the sharded model has another number of parameters"
        )


def _clip(ledger: Ledger, reference: Any, model: Any) -> None:
    """Clip both to half of the true norm, and compare the norms and the gradients (H8)."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    norms = [whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5 * float(norm))) for m in (reference, model)]
    ledger.close("gradient norm", norms[0], norms[1])
    ledger.errors(gradient_errors(reference, model))


def options(s: Subject, ledger: Ledger) -> None:
    """Train with every further value of the case's options."""
    tried = [(name, value) for name, values in s.case.options.items() for value in values[1:]]
    for name, value in tried:
        other = dataclasses.replace(s, options={name: value})
        with ledger.check("options"):
            ledger.absorb(
                f"{name}={value!r}", TRAINING, functools.partial(training, dataclasses.replace(other, steps=1))
            )
    if not tried:
        ledger.closed("the case has no options with several values", "options")


#: What `training` checks of steps.
STEPS = ("accumulation", "clipping", "optimizer")
#: What `training` checks.
TRAINING = ("names", "ties", "forward", "loss", "gradients", *STEPS)

#: What is recomputed how, and when it is turned on.
_WAYS = (("reentrant", {"use_reentrant": True}, "before"), ("non-reentrant", {"use_reentrant": False}, "after"))


def recomputation(s: Subject, ledger: Ledger) -> None:
    """Gradient checkpointing recomputes as in the unsharded model, with equal gradients (H16)."""
    with ledger.check("checkpointing"):
        if not s.case.supports.checkpointing:
            ledger.closed("checkpointing")
            return
        for kind, arguments, when in _WAYS:
            if arguments["use_reentrant"] and not s.case.supports.reentrant:
                continue  # the check of what is closed tries it
            with ledger.place(f"{kind}, enabled {when} sharding"):
                _recompute(s, ledger, arguments, when)


def _recompute(s: Subject, ledger: Ledger, kind: dict[str, Any], when: str) -> None:
    reference = s.build()
    model = copy.deepcopy(reference)
    name = s.blocks(reference, s.plan(reference))
    checkpointing(reference, kind)
    if when == "before":
        checkpointing(model, kind)
    s.shard(model)
    if when == "after":
        checkpointing(model, kind)
    again = [recomputed(s, m, name) for m in (reference, model)]
    ledger.errors(gradient_errors(reference, model))
    if not any(again[0]):
        ledger.failed(f"the unsharded model recomputes nothing in {name or 'itself'}; correct the case's layers=")
    for index, (wanted, got) in enumerate(zip(*again, strict=True)):
        ledger.true(got > 0 or wanted == 0, f"block {index} is not recomputed, and {wanted} modules of it should be")


def recomputed(s: Subject, model: Any, name: str) -> list[int]:
    """Train with one batch; return how many modules of each block of ``name`` the backward calls again."""
    blocks = list(model.train().get_submodule(name)) if name else [model.train()]
    with calls_of_leaves(blocks) as calls:
        loss = s.loss(model(**s.inputs(model)))
        first = [counter.total() for counter in calls]
        loss.backward()
        return [counter.total() - before for counter, before in zip(calls, first, strict=True)]


def communication(s: Subject, ledger: Ledger) -> None:
    """One more block costs no more collectives than the case allows (H1)."""
    with ledger.check("communication"):
        whole_model = s.build()
        made = s.plan(whole_model)
        name = s.blocks(whole_model, made)
        count = len(list(whole_model.get_submodule(name).children())) if name else 0
        if not name or (count < 2 and not s.case.layers):
            ledger.closed("neither the case nor the policy names blocks of which there are two")
            return
        if count < 2:
            ledger.failed(f"{name} has {count} block; two or more are needed to count what one more costs")
            return
        fewer = _without_last_block(whole_model, name)
        try:
            s.plan(fewer)
        except PlanError as error:
            if not (alone := _only_there(whole_model, f"{name}.{count - 1}")):
                raise
            ledger.failed(
                f"the model is compared with one without the last block of {name}, which the policy does not fit: only "
                f"that block has {', '.join(alone)}; give the model of the case another such block ({error})"
            )
            return
        if (problem := _raises(s, fewer)) is not None:
            ledger.closed(f"the unsharded model without the last block of {name} raises {problem}")
            return
        costs = [_cost(s, m) for m in (whole_model, fewer)]
        if any(getattr(module, "exchange", None) is not None for module in whole_model.modules()):
            ledger.closed(
                "ranks with unequal parts exchange rows of weights, which the case's collectives do not count"
            )
            return
        shared = gathers_of_heads(made, f"{name}.{count - 1}")
        for index, phase in enumerate(("forward", "backward")):
            cost, own = costs[0][index] - costs[1][index], s.case.collectives[index]
            message = f"one more block of {name} costs {cost} collectives {phase}, and {own + shared} are allowed (H1)"
            message += f": {own} by the case's collectives="
            message += f", and {shared} because ranks share key/value heads" if shared else ""
            ledger.true(cost <= own + shared, message)
        # What is replicated needs none: the case would then be of no use.
        ledger.true(costs[0][1] > 0, "a training step communicates nothing")


def _only_there(model: nn.Module, place: str) -> list[str]:
    """Return the classes of modules that one module has, itself included, and nothing outside it."""
    inside = set(model.get_submodule(place).modules())
    outside = {type(module) for module in model.modules() if module not in inside}
    return sorted({type(module).__name__ for module in inside if type(module) not in outside})


def _without_last_block(model: Any, name: str) -> Any:
    fewer = copy.deepcopy(model)
    blocks: Any = fewer.get_submodule(name)
    owner, _, last = name.rpartition(".")
    config: Any = getattr(fewer.get_submodule(owner), "config", None)
    if getattr(config, "num_hidden_layers", None) == len(blocks):  # a forward may count them there
        config.num_hidden_layers = len(blocks) - 1
    if isinstance(blocks, nn.ModuleList):
        del blocks[len(blocks) - 1]
    else:
        setattr(fewer.get_submodule(owner), last, nn.Sequential(*list(blocks)[:-1]))
    return fewer


def _raises(s: Subject, model: Any) -> str | None:
    """Return what an unsharded model raises when it is called: it may weigh the outputs of all its blocks."""
    try:
        with torch.no_grad():
            s.loss(model(**s.inputs(model)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _cost(s: Subject, model: Any) -> tuple[int, int]:
    s.shard(model)
    inputs = s.inputs(model)
    with Collectives() as seen:
        loss = s.loss(model(**inputs))
        forward = seen.take()
        loss.backward()
        return forward, seen.take()
