"""Models that gather the outputs that they capture from their layers (attention weights, hidden states)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import gather_from_tp
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.sequence.shard import SequenceShard

#: What a model may capture from its layers -> how the ranks hold it, and the argument of the rule that gathers it.
CAPTURED = {
    "attentions": ("each rank has the attention weights of its own heads", 'attentions="heads"'),
    "hidden_states": ("tokens are split, and each rank has the states of its own", 'hidden_states="sequence"'),
}


class ReturnDict(Argument):
    """The argument ``return_dict`` of a forward."""

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Look it up in the signature of a module."""
        names = list(inspect.signature(module.forward).parameters)
        return cls("return_dict", names.index("return_dict") if "return_dict" in names else sys.maxsize)

    def is_tuple(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a call of ``module`` returns a tuple; its configuration decides where the caller does not."""
        wish = self.given(args, kwargs)
        return not (getattr(getattr(module, "config", None), "return_dict", True) if wish is None else wish)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the same call for named outputs."""
        if self.position < len(args):
            return self.changed(args, kwargs, lambda _: True)
        return args, {**kwargs, self.name: True}


class OutputGatherer(ParallelMixin):
    """A model that gathers the outputs that it captures from its layers, before it returns them.

    Gathering here, not in each layer, costs nothing for outputs that the caller did not ask for. Gradients through
    gathered outputs are exact. A tuple (``return_dict=False``) is made from the named outputs.

    Options:
        dims: (name, dim, full size) for each output that is split over the ranks; the sizes of all ranks' parts where
            they are uneven.
        by_tokens: outputs that are split along the sequence where the activations are.
        places: outputs that take a place in the native tuple even where they are None.
        tokens: how the sequence of the module, or of one below it, is split; None if it never is.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {
        "by_tokens": "_by_tokens",
        "dims": "_dims",
        "places": "_places",
        "tokens": "_captured_tokens",
    }

    _captured_tokens: SequenceShard | None
    _dims: tuple[tuple[str, int, int | tuple[int, ...]], ...]
    _by_tokens: tuple[str, ...]
    _places: tuple[str, ...]
    _return_dict: ReturnDict
    _shard_context: ShardContext

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context, **options)
        new._return_dict = ReturnDict.of(new)
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward and gather what it captured."""
        as_tuple = self._return_dict.is_tuple(self, args, kwargs)
        if as_tuple:
            args, kwargs = self._return_dict.named(args, kwargs)
        out = super().forward(*args, **kwargs)
        self._refuse_forgotten(out)
        tokens = self._captured_tokens
        for name, dim, size in self._dims:
            if captured := _named(out).get(name):  # each None where an attention implementation returns no weights
                channel = self._shard_context.channel.exact
                out[name] = tuple(None if t is None else gather_from_tp(t, channel, dim, size) for t in captured)
        if tokens is not None:
            last = _named(out).get("last_hidden_state")  # a library puts it in the place of the last captured one
            for name in self._by_tokens:
                if captured := _named(out).get(name):
                    out[name] = tuple(t if t is None or t is last else tokens.gather_captured(t) for t in captured)
        return self._as_tuple(out) if as_tuple else out

    def _refuse_forgotten(self, out: Any) -> None:
        weights = {name: value for name, value in _named(out).items() if name.endswith("attentions")}
        gathered = {name: full if isinstance(full, int) else sum(full) for name, _, full in self._dims}
        for name in (name for name in weights if name not in gathered):
            for other, dim, _ in self._dims:
                local = _size(weights.get(other), dim)
                if local is not None and local == _size(weights[name], dim) != gathered[other]:
                    raise NotSupportedError(
                        f"this {type(self).__name__} would return {name} of {local} heads, of this rank alone: its "
                        f"policy gathers {', '.join(gathered)}, to {gathered[other]} heads, and not them. Do not ask "
                        f'for them (output_attentions=False), or add {name}="heads" to outputs(...) in the policy'
                    )

    def _as_tuple(self, out: Any) -> tuple[Any, ...]:
        """Return what the native forward returns for ``return_dict=False``."""
        if not self._places:
            return tuple(out.to_tuple())
        values = {field.name: getattr(out, field.name) for field in fields(out)}
        return tuple(value for name, value in values.items() if value is not None or name in self._places)


class RefusesCaptured(ParallelMixin):
    """A model that does not return what it captured: each rank has a part of it, and no rule says how to gather it.

    Options:
        outputs: (name, a module in which each rank has a part) for each of `CAPTURED` that is refused.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"outputs": "_refused"}

    _refused: tuple[tuple[str, str], ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, and refuse to return what it captured from its layers."""
        out = super().forward(*args, **kwargs)
        for name, where in self._refused:
            if self._returns(out, name, kwargs):
                why, argument = CAPTURED[name]
                raise NotSupportedError(
                    f"this {type(self).__name__} would return {name} that are not whole: {why} ({where}), and no rule "
                    f"of its policy gathers them. Do not ask for them (output_{name}=False), or add "
                    f"outputs({argument}) to the policy, under the class that returns them, which is often that whose "
                    "forward runs the blocks"
                )
        return out

    def _returns(self, out: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
        if not isinstance(out, tuple):
            return any(key.endswith(name) and _holds_tensors(value) for key, value in _named(out).items())
        asked = kwargs.get(f"output_{name}")
        if asked is None:
            asked = getattr(getattr(self, "config", None), f"output_{name}", False)
        return bool(asked) and any(_holds_tensors(value) for value in out)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)


def _named(out: Any) -> Mapping[str, Any]:
    return out if isinstance(out, Mapping) else getattr(out, "__dict__", {})


def _size(captured: Any, dim: int) -> int | None:
    """Return a size of the first tensor of what was captured, if there is one."""
    tensors = captured if isinstance(captured, tuple | list) else ()
    return next((t.shape[dim] for t in tensors if isinstance(t, Tensor) and t.ndim > dim), None)
