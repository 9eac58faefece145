"""Checks of sequence parallelism: what other sections compare, compared again with tokens split over the ranks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import nn

from shardcore.errors import PlanError
from shardcore.nn.sequence.tokens import SequenceStack
from shardcore_testing import checks_random, checks_state, checks_training
from shardcore_testing.findings import Ledger
from shardcore_testing.subject import Subject


def sequence(s: Subject, ledger: Ledger) -> None:
    """With tokens split over the ranks, outputs, losses, gradients and steps are as before."""
    with ledger.check("sequence"):
        if (split := _split(s, ledger)) is None:
            return
        _splits(split, ledger)
        training = functools.partial(checks_training.training, dataclasses.replace(split, steps=1))
        ledger.absorb("", checks_training.TRAINING, training)


def sequence_modes(s: Subject, ledger: Ledger) -> None:
    """With tokens split over the ranks, masks, recomputation, captured outputs, generation and cost are as before."""
    with ledger.check("sequence modes"):
        if (split := _split(s, ledger)) is None:
            return
        for name, run in (
            ("checkpointing", checks_training.recomputation),
            ("dropout", checks_random.dropout),
            ("replicas", checks_random.replicas),
            ("captured", checks_state.captured),
            ("generation", checks_random.generation),
        ):
            ledger.absorb(name, (name,), functools.partial(run, split))
        # The partial gradients of norms and biases are sent once for each step.
        deferred = dataclasses.replace(split, fields={**split.fields, "partial_gradients": "deferred"})
        twice: Any = tuple(2 * allowed for allowed in s.case.collectives)
        cheaper = dataclasses.replace(deferred, case=dataclasses.replace(split.case, collectives=twice))
        ledger.absorb("cost", ("communication",), functools.partial(checks_training.communication, cheaper))


def context(s: Subject, ledger: Ledger) -> None:
    """Ranks that divide the tokens of their batches compute what one does, by exchanges and, where they can, rings."""
    with ledger.check("context"):
        lacks = s.lacks_context() if s.case.supports.context else "context parallelism"
        if lacks is not None:
            ledger.closed(lacks)
            return
        exchanged, ringed = (
            dataclasses.replace(s, dp=1, steps=1, fields={**s.fields, "cp": s.dp, "context_parallel_mode": mode})
            for mode in ("all_to_all", "ring_attn")
        )
        ledger.absorb("exchanges", checks_training.TRAINING, functools.partial(checks_training.training, exchanged))
        if (possible := _planned(ringed)) is not None:
            ledger.absorb("rings", checks_training.TRAINING, functools.partial(checks_training.training, possible))


def _planned(s: Subject) -> Subject | None:
    """Return the subject with the first option for which there is a plan: a ring computes one kind of scores."""
    tried = [{}, *({name: value} for name, values in s.case.options.items() for value in values[1:])]
    for options in tried:
        found = dataclasses.replace(s, options={**s.options, **options})
        try:
            found.plan(found.build())
        except PlanError:
            continue
        return found
    return None


def _split(s: Subject, ledger: Ledger) -> Subject | None:
    """Return the subject with split tokens, or close the check."""
    if not s.case.supports.sequence:
        ledger.closed("sequence parallelism")
        return None
    # A model that checkpoints the calls of its blocks by itself can do that without reentrancy only.
    supports = dataclasses.replace(s.case.supports, reentrant=False)
    case = dataclasses.replace(s.case, supports=supports)
    return dataclasses.replace(s, case=case, fields={**s.fields, "enable_sequence_parallelism": True})


def _splits(s: Subject, ledger: Ledger) -> None:
    """Tokens are split."""
    model = s.shard(s.build())
    stacks = [module for module in model.modules() if isinstance(module, SequenceStack)]
    called: list[nn.Module] = []  # a model may have one that these inputs do not reach
    for stack in stacks:
        stack.register_forward_hook(lambda module, args, out: called.append(module))
    model(**s.inputs(model))
    lengths = [stack._tokens.last for stack in stacks if stack in called]
    ledger.true(bool(lengths), "no module of the model splits its tokens")
    ledger.true(None not in lengths, "the inputs of the case have fewer tokens than there are ranks")
