"""What crosses from stage to stage, found out by running the forward without what the stages hold.

Tracing runs the model's own forward on real arguments, so that whatever it computes of masks, positions and lengths is
computed; parts of the model, which hold all its parameters, are called on meta. What crosses to a stage is what its
first block is called with and depends on parts of other stages. That is found by NaN as a probe: they return NaN, all
others numbers. No part of a stage may be called with NaN in any other way, and no loss may be made of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError, NotSupportedError, ShardcoreError
from shardcore.nn.copies import meta_copy
from shardcore.pipeline.losses import Loss, LossCalls, named, reductions_of, wide
from shardcore.pipeline.metadata import PROBE, StageMetadata, answered, captured, described
from shardcore.pipeline.microbatches import shapes_of
from shardcore.pipeline.passing import HELD, VARIED, BoundaryReached, Passing, is_probe, other
from shardcore.pipeline.pruning import CallHandler
from shardcore.pipeline.stage import PrunedModel
from shardcore.plan.cut import Cut

_KEPT = 64  # what is known of calls of other shapes: some bytes each


class StageTracer:
    """Traces calls of a model on a copy of it on meta, of which each part can be called without its values.

    Args:
        model: the whole model, sharded along ``tp`` if it will be when it runs.
        cut: how it is cut.
        device: where it runs.
        dtype: in which it will compute, where FSDP2 will cast the inputs of the model and of its blocks.
        fp8: what crosses will travel in 8 bits.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        fp8: bool = False,
    ) -> None:
        self.cut, self.device, self._fp8 = cut, device, fp8
        self._of, self._model, self._dtype = model, meta_copy(model, dtype), dtype
        self._configs: dict[int, Any] = {}  # by identity
        for module, copied in zip(model.modules(), self._model.modules(), strict=True):
            if "config" in module.__dict__:  # what is set there later is traced too
                config = copied.__dict__["config"] = module.__dict__["config"]
                self._configs[id(config)] = config
        self._known: dict[str, StageMetadata] = {}
        self._apart: dict[str, set[int]] = {}  # of the output, by the kind of a call
        self._pruned = PrunedModel(self._model, cut, (), device)

    def forms(self, parts: Sequence[Mapping[str, Any]], loss: Loss | None) -> list[tuple[str, StageMetadata]]:
        """Return of each micro-batch the name of its form, and what is known of that; a form is traced once.

        Args:
            parts: the arguments of micro-batches.
            loss: of an output; None for outputs alone.
        """
        # Of what the configuration says now a forward may do something else.
        values = (value for config in self._configs.values() for value in vars(config).values())
        settings = [value for value in values if isinstance(value, bool | int | float | str | None)]
        keys = [f"{self._of.training} {named(loss)} {settings} {shapes_of(part)}" for part in parts]
        found = {}
        for key in dict.fromkeys(keys):
            alike = [part for part, other in zip(parts, keys, strict=True) if other == key]
            found[key] = self._known.get(key) or self._form(key, alike, loss)
        return [(key, found[key]) for key in keys]

    def _form(self, key: str, alike: Sequence[Mapping[str, Any]], loss: Loss | None) -> StageMetadata:
        """Return what is known of micro-batches of one form, by one that has labels which count."""
        for part in alike:
            found = self(part, loss)
            if all(reduction.shifted is not None for reduction in found.reductions):
                break
        else:
            return found  # nobody can tell, and none of them counts
        while len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = found
        return found

    def __call__(self, arguments: Mapping[str, Any], loss: Loss | None = None) -> StageMetadata:
        """Return what stages return and send in calls of the model with arguments of these shapes.

        Args:
            arguments: of a call.
            loss: of the model's output; None for outputs alone.

        Raises:
            ConfigError: the loss is no tensor ().
            NotSupportedError: a stage would need what it does not have; the message names it.
        """
        self._model.train(self._of.training)
        recorder = Recorder(self, self.device)
        with LossCalls(arguments, traced=True) as inside:
            try:
                whole = self.run(recorder, arguments)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, ShardcoreError) or "meta" not in str(error):
                    raise  # of what the model is called with
                raise self._inside(error) from error
        self._check_order(recorder.blocks)
        outputs = {name: tuple(trees) for name, trees in recorder.outputs.items()}
        found, out = self._passed(arguments, outputs, crosses=False)
        if any(is_probe(leaf) and not leaf.ndim for leaf in tree_flatten(out)[0]):
            # A loss is made of what is inside of earlier blocks, such as the scores of routers.
            found, out = self._passed(arguments, outputs, crosses=True)
        if loss is None:
            return found
        with torch.enable_grad(), LossCalls(arguments, traced=True) as outside:
            value = _checked(loss(whole, arguments))
        # Of labels that are all left out a loss is NaN anyway.
        if is_probe(loss(out, arguments)) and not is_probe(value):
            raise NotSupportedError(
                f"the loss of {type(self._model).__name__} depends on what an earlier stage has computed, such as "
                f"states of {self.cut.blocks[0]}, besides what goes on to the last stage; use "
                "pipeline_parallel_size=1"
            )
        if local_tensor(value).is_meta:
            raise self._inside("the loss is made of it")
        reductions = reductions_of(whole, value, inside.calls, outside.calls, arguments)
        return dataclasses.replace(found, loss=wide(value).dtype, reductions=reductions)

    def _passed(
        self, arguments: Mapping[str, Any], outputs: Mapping[str, tuple[Any, ...]], *, crosses: bool
    ) -> tuple[StageMetadata, Any]:
        """Return what is known of stages, and what the last one returns; ``crosses`` says whether `captured` does."""
        out, boundaries, passed = None, [], list[Passing]()
        for stage in range(len(self.cut)):
            held = frozenset(self._pruned.of(stage))
            passing = Passing(
                cut=self.cut, stage=stage, held=held, outputs=outputs, device=self.device, crosses=crosses
            )
            out = self._as(passing, arguments)
            passed.append(passing)
            if passing.boundary is not None:
                boundaries.append(passing.boundary)
            elif stage:
                raise NotSupportedError(
                    f"{self.cut.blocks[self.cut.bounds[stage]]} begins stage {stage}, and was not called; "
                    f"{type(self._model).__name__} does not run its blocks in the order of its Stages"
                )
        missing = {place for place, leaf in enumerate(tree_flatten(out)[0]) if is_probe(leaf)}
        missing |= self._unlike(arguments, passed, out)
        metadata = StageMetadata(
            outputs=outputs, boundaries=tuple(boundaries), missing=tuple(sorted(missing)), fp8=self._fp8
        )
        return metadata, out

    def _as(self, passing: Passing, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.run(passing, arguments, passing.stage, passing.number, passing.whole)
        except ShardcoreError:
            raise
        except Exception as error:  # where all parts are there it ran
            raise self._inside(error) from error

    def _unlike(self, arguments: Mapping[str, Any], passed: Sequence[Passing], out: Any) -> set[int]:
        """Return which leaves of the output depend on other stages without being NaN; asked once for each kind of call.

        Raises:
            NotSupportedError: a part is called with such values.
        """
        kind = f"{self._model.training} { {name: type(value) for name, value in arguments.items()} }"
        if kind not in self._apart:
            leaves, found = tree_flatten(out)[0], list[set[int]]()
            for passing, (number, whole) in itertools.product(passed[1:], VARIED):
                varied = dataclasses.replace(passing, number=number, whole=whole, before=passing.seen)
                again = self._as(varied, arguments)
                if passing.stage == len(self.cut) - 1:
                    found.append(set(other(leaves, tree_flatten(again)[0])))
            self._apart[kind] = set().union(*found[1:]) - found[0] if found else set()  # the first are drawn
        return self._apart[kind]

    @contextmanager
    def on_meta(self) -> Iterator[None]:
        """Have all parts on meta: one may call or read another."""
        with ExitStack() as stack:
            for tensors in self._pruned.tensors.values():
                stack.enter_context(tensors.on_meta())
            yield

    def cast(self, tree: Any) -> Any:
        """Return what a unit of FSDP2 is called with, of what it is given."""
        if self._dtype is None:
            return tree
        return tree_map_only(Tensor, lambda t: t.to(self._dtype) if t.is_floating_point() else t, tree)

    def _inside(self, error: Exception | str) -> NotSupportedError:
        return NotSupportedError(
            f"{type(self._model).__name__} computes with what is inside of blocks, of which each stage has its own, "
            f"such as the logits of routers for a balancing loss ({error}); leave it out (output_router_logits=False), "
            "or use pipeline_parallel_size=1"
        )

    def _check_order(self, calls: Sequence[str]) -> None:
        """A stage ends at the first call of the next one's first block: its own blocks may not be called after that."""
        blocks = self.cut.blocks
        places = [blocks.index(name) for name in calls]
        for before, after in itertools.pairwise(places):
            if after < before and blocks[after] in calls[: places.index(before)]:
                raise NotSupportedError(
                    f"{type(self._model).__name__} calls {blocks[after]} again after {blocks[before]}, and a stage of "
                    "a pipeline runs its blocks before those of the next one; use pipeline_parallel_size=1"
                )

    def run(
        self,
        handler: CallHandler,
        arguments: Mapping[str, Any],
        stage: int | None = None,
        number: float = PROBE,
        whole: int = 0,
    ) -> Any:
        """Run the forward of one stage, or of the whole model, until the next stage begins."""
        held = self._pruned.tensors if stage is None else self._pruned.of(stage)
        for name, tensors in self._pruned.tensors.items():
            tensors.fill(HELD if name in held else number, whole)
        before, self._pruned.handlers[:] = list(self._pruned.handlers), [handler]
        try:
            with torch.no_grad():
                return self._model(**self.cast(arguments))
        except BoundaryReached:
            return None
        finally:
            self._pruned.handlers[:] = before


class Recorder:
    """Calls every part on meta, writes down what it returns, and returns that on a device."""

    def __init__(self, tracer: StageTracer, device: torch.device | str) -> None:
        self._tracer, self._device = tracer, device
        self._inside = False  # of a part, which has called another one
        self.outputs: dict[str, list[Any]] = {}
        self.blocks: list[str] = []  # in the order of their calls

    def called(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call of a part, as they are."""
        if name in self._tracer.cut.blocks:
            self.blocks.append(name)
        return args, kwargs

    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a part on meta, and return what it returns, of another number."""
        if self._inside:
            inner = native(*args, **kwargs)
            self.outputs.setdefault(name, []).append((described(inner), []))
            return inner
        self._inside = True
        kept = [(values, len(values)) for values in captured()]
        try:
            with self._tracer.on_meta(), OnMeta():  # type: ignore[no-untyped-call]
                args, kwargs = _on_meta(args), _on_meta(kwargs)
                if name in self._tracer.cut.blocks:
                    args, kwargs = self._tracer.cast(args), self._tracer.cast(kwargs)
                out = described((native(*args, **kwargs), [values[before:] for values, before in kept]))
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NotSupportedError(
                f"{name} cannot be called on meta, which tells a pipeline what it returns: {error}; use "
                "pipeline_parallel_size=1"
            ) from error
        finally:
            self._inside = False
            for values, before in kept:
                del values[before:]
        self.outputs.setdefault(name, []).append(out)
        return answered(out, self._device, HELD)


class OnMeta(TorchDispatchMode):
    """Runs on meta whatever has a tensor there among its arguments; torch mixes devices in silence here and there.

    What a part makes of lengths alone is computed, where it would be: parts slice by it, and libraries keep it for all
    models of the process.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _any_on_meta((args, kwargs)):
            return func(*args, **kwargs)
        if func is torch.ops.aten.nonzero.default:
            # Nobody knows there which entries are not zero: none are, so that no expert has a token.
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        if func is GROUPED:
            return grouped(*_on_meta(args), **_on_meta(kwargs))
        if func.overloadpacket.__name__.endswith("_") and not _any_on_meta(args[0]):
            raise NotImplementedError(f"{func} would write what is not known into a tensor that is not on meta")
        if func.overloadpacket in _INDEXED and not _any_on_meta(args[1]):  # the indices tell how many they choose
            return func(_on_meta(args[0]), args[1], *_on_meta(args[2:]), **kwargs)
        return func(*_on_meta(args), **_on_meta(kwargs))


_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


#: What experts multiply with, of which torch tells shapes in bfloat16 alone.
GROUPED = torch.ops.aten._grouped_mm.default


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return a tensor without values, of the shape of what `GROUPED` returns."""
    if offs is None or (a.dim(), b.dim()) == (3, 3):
        return a.new_empty((*a.shape[:-1], b.shape[-1]))
    groups = (len(offs),) if (a.dim(), b.dim()) == (2, 2) else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _on_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)


def _any_on_meta(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_flatten(tree)[0])


def _checked(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(f"the loss is {got}; loss= (of a Booster, its criterion) is to return a tensor ()")
    return value
