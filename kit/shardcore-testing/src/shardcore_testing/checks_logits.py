"""Checks of logits that stay split over the vocabulary, and of losses that are computed from their parts."""

from __future__ import annotations

import dataclasses
import functools

from shardcore_testing import checks_random, checks_training
from shardcore_testing.findings import Ledger
from shardcore_testing.subject import Subject


def split_logits(s: Subject, ledger: Ledger) -> None:
    """Losses of split logits, kept or computed in chunks of tokens, and whole logits without labels (H10, H26, H37)."""
    with ledger.check("split logits"):
        if not any(name.endswith("labels") for name in s.inputs(s.build())):
            ledger.closed("the case gives no labels")
            return
        split = dataclasses.replace(s, fields={**s.fields, "parallel_output": True})
        if not any(step.splits_logits for step in split.plan(s.build()).steps):
            ledger.closed("no head splits a vocabulary")
            return
        for name, fields in (("kept", {}), ("chunks of 5", {"loss_chunk_size": 5})):
            subject = dataclasses.replace(split, fields={**split.fields, **fields})
            training = functools.partial(checks_training.training, dataclasses.replace(subject, steps=1))
            ledger.absorb(name, checks_training.TRAINING, training)
        ledger.absorb("generation", ("generation",), functools.partial(checks_random.generation, split))
