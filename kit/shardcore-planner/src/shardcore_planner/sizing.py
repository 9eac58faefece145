"""What crosses between stages in calls of other sizes: of what is known of a short call, on meta."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten
from typing_extensions import override

from shardcore.pipeline import Boundary, StageMetadata, StageTracer
from shardcore.pipeline.metadata import captured
from shardcore.pipeline.tracing import OnMeta, Recorder


def resized(tracer: StageTracer, metadata: StageMetadata, arguments: Mapping[str, Any]) -> StageMetadata:
    """Return what is known of arguments of other sizes, without a number: nothing of their size is allocated.

    Args:
        tracer: of the model.
        metadata: of a call with the same arguments of any size, and in the same mode.
        arguments: of the call, on meta.
    """
    sizing = _Sizing(tracer, metadata.boundaries)
    with OnMeta():  # type: ignore[no-untyped-call]  # untyped in torch
        tracer.run(sizing, arguments)
    return dataclasses.replace(
        metadata,
        outputs={name: tuple(trees) for name, trees in sizing.outputs.items()},
        boundaries=tuple(sizing.boundaries[boundary.block] for boundary in metadata.boundaries),
    )


class _Sizing(Recorder):
    """Returns everything on meta, and writes down what crosses, of which it is known where it is."""

    def __init__(self, tracer: StageTracer, known: Sequence[Boundary]) -> None:
        super().__init__(tracer, "meta")
        self._places = {boundary.block: boundary.places for boundary in known}
        self.boundaries: dict[str, Boundary] = {}

    @override
    def called(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if name in self._places and name not in self.boundaries:
            self.boundaries[name] = Boundary.of(name, self._places[name], tree_flatten((args, kwargs, captured()))[0])
        return args, kwargs
