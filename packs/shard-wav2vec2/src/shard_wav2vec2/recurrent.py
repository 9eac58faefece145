"""A word for recurrent modules of torch, which keep a list of their weights beside the parameters."""

from __future__ import annotations

from typing import Any

from shardcore.nn import ReplacedMethods
from shardcore.policy import Rule, Word


class ReadsParameters(ReplacedMethods):
    """A `torch.nn.LSTM` or `torch.nn.GRU` that computes with its parameters as they are when it is called.

    Its own forward computes with `_flat_weights`, a list of what they were when it was built.
    """

    _flat_weights: list[Any]
    _flat_weights_names: list[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the native forward, with the parameters in that list."""
        kept = self._flat_weights
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._flat_weights = kept


def reads_parameters(name: str) -> Rule:
    """A recurrent module that other rules replicate: it reads the parameters that are trained."""
    return Word(text=f"reads_parameters({name!r})", planned=lambda scope: scope.swap(name, ReadsParameters))
