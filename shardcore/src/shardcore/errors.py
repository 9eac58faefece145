"""Every exception and warning of shardcore.

ShardcoreError
├── ConfigError (ValueError)             a configuration contradicts itself or the number of ranks
├── NotSupportedError (NotImplementedError)   a valid wish that this release cannot fulfil
│   └── VocabParallelLogitsError (AttributeError)     an attribute of tensors that split logits lack
├── RegistryError
│   ├── PackError (ImportError)          a pack that could not be loaded
│   ├── NoPolicyError (LookupError)      no installed pack serves this model class
│   └── AmbiguousPolicyError (LookupError)    several packs serve it and none has priority
├── PlanError (ValueError)               a policy does not fit a model; carries every problem found
├── AgreementError (RuntimeError)        the ranks do not hold the same model, arguments, versions or weights
├── AlreadyShardedError (RuntimeError)   the model was sharded before
├── PartlyShardedError (RuntimeError)    something failed on a rank while the models were being changed
├── WrapError (TypeError)                a wrapper or a copy that cannot work on a sharded model
├── CheckpointError (RuntimeError)       a training checkpoint that cannot be written or read
└── MissingRanksError (TimeoutError)     a collective save that only some ranks joined, or whose writer is gone

ShardcoreWarning (UserWarning)
├── StaleOptimizerWarning                an optimizer still holds the parameters from before sharding
├── BrokenPackWarning                    an installed pack was left out because it failed to load
└── UntestedVersionWarning               a library is outside of the range that a pack was tested with

Every error also derives from the builtin that a caller would expect (in brackets). This module imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AgreementError",
    "AlreadyShardedError",
    "AmbiguousPolicyError",
    "BrokenPackWarning",
    "CheckpointError",
    "ConfigError",
    "MissingRanksError",
    "NoPolicyError",
    "NotSupportedError",
    "PackError",
    "PartlyShardedError",
    "PlanError",
    "Problem",
    "RegistryError",
    "ShardcoreError",
    "ShardcoreWarning",
    "StaleOptimizerWarning",
    "UntestedVersionWarning",
    "VocabParallelLogitsError",
    "WrapError",
]


class ShardcoreError(Exception):
    """Base of every error that shardcore raises on purpose."""

    #: Where several ranks raise for one reason, the rank that prints it in full if nobody catches it.
    told_by: int | None = None


class ConfigError(ShardcoreError, ValueError):
    """A configuration contradicts itself, or does not fit the number of ranks."""


class NotSupportedError(ShardcoreError, NotImplementedError):
    """A valid wish that this release cannot fulfil; the message says what to do instead."""


class VocabParallelLogitsError(NotSupportedError, AttributeError):
    """Logits that are split over the vocabulary were asked for an attribute that only whole ones have."""


class RegistryError(ShardcoreError):
    """Base of the errors about packs and how a policy is found."""


class PackError(RegistryError, ImportError):
    """A pack could not be loaded; the cause is chained."""


class NoPolicyError(RegistryError, LookupError):
    """No installed pack serves this model class."""


class AmbiguousPolicyError(RegistryError, LookupError):
    """Several packs serve this class, of a model or of a module in it, with equal priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that keeps a policy from fitting a model.

    Attributes:
        where: the module or parameter, by its full name in the model (``""`` is the model itself).
        rule: the rule of the policy that asked for it, as it prints.
        what: what is wrong, with the sizes or names that were found and those that were wanted.
        todo: the next step for the reader.
    """

    where: str
    rule: str
    what: str
    todo: str

    def __str__(self) -> str:
        place = self.where or "(the model itself)"
        return f"{place}: {self.what}\n    rule: {self.rule}\n    next: {self.todo}"


class PlanError(ShardcoreError, ValueError):
    """A policy does not fit a model; ``problems`` holds everything that was found, in the order of the model."""

    def __init__(self, subject: str, problems: Sequence[Problem]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        super().__init__(subject, self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{self.subject}: {count} problem{'s' * (count != 1)}; nothing was changed."]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join(lines)


class AgreementError(ShardcoreError, RuntimeError):
    """The ranks do not hold the same model, arguments, versions or weights, or one failed; nothing was changed."""


class AlreadyShardedError(ShardcoreError, RuntimeError):
    """The model, or a part of it, was sharded before."""


class PartlyShardedError(ShardcoreError, RuntimeError):
    """A policy's own code, or FSDP2, failed on a rank while models were being changed: none of them can be used."""


class WrapError(ShardcoreError, TypeError):
    """A wrapper, a move or a copy that cannot work on a sharded model; the message says what does."""


class CheckpointError(ShardcoreError, RuntimeError):
    """A training checkpoint could not be written, or is not complete, damaged, or not one of this model."""


class MissingRanksError(ShardcoreError, TimeoutError):
    """A call that every rank has to make was made, or finished, by some only; ``missing`` names the others."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class ShardcoreWarning(UserWarning):
    """Base of every warning that shardcore gives."""


class StaleOptimizerWarning(ShardcoreWarning):
    """An optimizer was made before the model was sharded and still holds the old parameters."""


class BrokenPackWarning(ShardcoreWarning):
    """An installed pack failed to load and was left out."""


class UntestedVersionWarning(ShardcoreWarning):
    """An installed library is outside of the range that a pack was tested with; under strict it is an error."""
