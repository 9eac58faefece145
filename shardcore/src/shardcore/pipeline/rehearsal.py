"""What crosses from stage to stage, found out by running the forward without what the stages hold.

A rehearsal runs the model's own forward on real arguments, so that whatever it computes of masks, positions and lengths
is computed; parts of the model, which hold all its parameters, are called on meta. What crosses to a stage is what its
first block is called with and depends on parts of other stages. That is found by NaN: they answer NaN, all others
numbers. No part of a stage may be called with NaN in any other way, and no loss may be made of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from typing_extensions import override

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.pipeline.hollow import Absent, Call, Watch, tensors_below, types_kept, watched
from shardcore.pipeline.items import LossCalls, forms_of
from shardcore.pipeline.script import NOWHERE, Crossing, Script, Value, answer, described
from shardcore.plan.cut import Cut

__all__ = ["GROUPED", "Reached", "Rehearsal", "grouped", "modules_of_parts", "names_of_parts"]

#: What parts answer that a stage can ask: any number but NaN, and none that norms divide by zero for.
_SOMETHING = 0.5


class Rehearsal:
    """A copy of a whole model on meta, of which each part can be called without its values.

    Args:
        model: the copy, sharded along ``tp`` if the model is; it is good for nothing else afterwards.
        cut: how the model is cut.
        device: where the model runs.
        dtype: what FSDP2 casts the inputs of the model and of its blocks to, and the parameters of ``model`` are in.
    """

    def __init__(
        self, model: nn.Module, cut: Cut, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self._model, self._cut, self._device, self._dtype = model, cut, device, dtype
        self._watch: list[Watch] = []
        self._names, self._absent = names_of_parts(model, cut), {}
        claimed: set[tuple[int, str]] = set()
        with types_kept(model, device):
            for name in dict.fromkeys(self._names.values()):
                own = [(m, leaf) for m, leaf in tensors_below(model, name) if (id(m), leaf) not in claimed]
                claimed |= {(id(m), leaf) for m, leaf in own}
                self._absent[name] = Absent(iter(own), device)
        for name, module in modules_of_parts(model, cut):
            if cut.holder(name) is not None:  # what all stages hold is run as it is, on what it is given
                watched(module, self._names[name], self._watch)

    def __call__(
        self, arguments: Mapping[str, Any], loss: Callable[[Any], Tensor] | None = None, *, training: bool = True
    ) -> Script:
        """Return the script for calls of the model with arguments of these shapes.

        Args:
            arguments: of a call.
            loss: returns the loss of the model's output.
            training: the mode of the model.

        Raises:
            NotSupportedError: a stage would need what it does not have; the message names it.
        """
        self._model.train(training)
        first = _Answering(self, self._device)
        with LossCalls(arguments) as inside:
            try:
                whole = self._run(first, arguments, held=lambda name: True)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, ShardcoreError) or "meta" not in str(error):
                    raise  # of what the model is called with
                raise self._inside(error) from error
        answers = {name: tuple(trees) for name, trees in first.answers.items()}
        self._check_order(first.blocks)
        crossings: list[Crossing] = []
        missing: tuple[int, ...] = ()
        for stage in range(len(self._cut)):
            passing = _Passing(self, answers, stage)
            try:
                out = self._run(passing, arguments, held=functools.partial(self._holds, stage))
            except ShardcoreError:
                raise
            except Exception as error:  # where all parts are there it ran
                raise self._inside(error) from error
            if stage:
                if passing.crossing is None:
                    raise NotSupportedError(
                        f"{self._cut.blocks[self._cut.bounds[stage]]} begins stage {stage}, and was not called; "
                        f"{type(self._model).__name__} does not run its blocks in the order of its Stages"
                    )
                crossings.append(passing.crossing)
            if stage == len(self._cut) - 1:
                leaves = tree_flatten(out)[0]
                missing = tuple(place for place, leaf in enumerate(leaves) if _is_nowhere(leaf))
                # Of labels that are all left out a loss is NaN anyway.
                if loss is not None and _is_nowhere(loss(out)) and not _is_nowhere(loss(whole)):
                    raise NotSupportedError(
                        f"the loss of {type(self._model).__name__} depends on what an earlier stage has computed, such "
                        f"as states of {self._cut.blocks[0]}, besides what goes on to the last stage; use "
                        "pipeline_parallel_size=1"
                    )
        if loss is None:
            return Script(answers=answers, crossings=tuple(crossings), missing=missing)
        with LossCalls(arguments) as outside:
            value = loss(whole)
        if local_tensor(value).is_meta:
            raise self._inside("the loss is made of it")
        forms = forms_of(whole, value, inside.calls, outside.calls, arguments)
        return Script(answers=answers, crossings=tuple(crossings), missing=missing, loss=Value.of(value), forms=forms)

    def resized(self, script: Script, arguments: Mapping[str, Any]) -> Script:
        """Return the script for arguments of other sizes, without a number: nothing of their size is allocated.

        Args:
            script: of a call with the same arguments of any size, and in the same mode.
            arguments: of the call, on meta.
        """
        sizing = _Sizing(self, {crossing.block: crossing for crossing in script.crossings})
        with _OnMeta():  # type: ignore[no-untyped-call]
            self._run(sizing, arguments, held=lambda name: True)
        return Script(
            answers={name: tuple(trees) for name, trees in sizing.answers.items()},
            crossings=tuple(sizing.crossings[crossing.block] for crossing in script.crossings),
            missing=script.missing,
            loss=script.loss,
            forms=script.forms,
        )

    @contextmanager
    def on_meta(self) -> Iterator[None]:
        """Have all parts on meta: one may call or read another."""
        with ExitStack() as stack:
            for absent in self._absent.values():
                stack.enter_context(absent.on_meta())
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
        """A stage ends at the first call of the next one's first block: its own blocks may not be called after that.

        Raises:
            NotSupportedError: a block is called again after one that follows it.
        """
        blocks = self._cut.blocks
        places = [blocks.index(name) for name in calls]
        for before, after in itertools.pairwise(places):
            if after < before and blocks[after] in calls[: places.index(before)]:
                raise NotSupportedError(
                    f"{type(self._model).__name__} calls {blocks[after]} again after {blocks[before]}, and a stage of "
                    "a pipeline runs its blocks before those of the next one; use pipeline_parallel_size=1"
                )

    def _holds(self, stage: int, name: str) -> bool:
        """Tell whether a stage holds a part under any of its names."""
        names = [other for other, first in self._names.items() if first == name]
        return any(self._cut.holder(other) in (stage, None) for other in names)

    def _run(self, watch: Watch, arguments: Mapping[str, Any], held: Callable[[str], bool]) -> Any:
        for name, absent in self._absent.items():
            absent.fill(_SOMETHING if held(name) else NOWHERE)
        self._watch[:] = [watch]
        try:
            with torch.no_grad():
                return self._model(**self.cast(arguments))
        except Reached:
            return None
        finally:
            self._watch.clear()


class Reached(BaseException):
    """The forward of a stage came to the first block of the next one; nothing of the model may catch it."""


class _Answering:
    """Calls every part on meta, writes down what it returns, and answers it on a device."""

    def __init__(self, rehearsal: Rehearsal, device: torch.device | str) -> None:
        self._rehearsal, self._device = rehearsal, device
        self._inside = False  # of a part, which has called another one
        self.answers: dict[str, list[Any]] = {}
        self.blocks: list[str] = []  # in the order of their calls

    def entered(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call of a part, as they are."""
        if name in self._rehearsal._cut.blocks:
            self.blocks.append(name)
        return args, kwargs

    def answered(self, name: str, forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            inner = forward(*args, **kwargs)
            self.answers.setdefault(name, []).append(described(inner))
            return inner
        self._inside = True
        try:
            with self._rehearsal.on_meta(), _OnMeta():  # type: ignore[no-untyped-call]
                args, kwargs = _on_meta(args), _on_meta(kwargs)
                if name in self._rehearsal._cut.blocks:
                    args, kwargs = self._rehearsal.cast(args), self._rehearsal.cast(kwargs)
                out = forward(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NotSupportedError(
                f"{name} cannot be called on meta, which tells a pipeline what it returns: {error}; use "
                "pipeline_parallel_size=1"
            ) from error
        finally:
            self._inside = False
        told = described(out)
        self.answers.setdefault(name, []).append(told)
        return answer(told, self._device, _SOMETHING)


class _Sizing(_Answering):
    """Answers on meta, and writes down what crosses, of which it is known where it is."""

    def __init__(self, rehearsal: Rehearsal, known: Mapping[str, Crossing]) -> None:
        super().__init__(rehearsal, "meta")
        self._known = known
        self.crossings: dict[str, Crossing] = {}

    @override
    def entered(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if name in self._known and name not in self.crossings:
            places, leaves = self._known[name].places, tree_flatten((args, kwargs))[0]
            values = tuple(Value.of(leaves[place]) for place in places)
            self.crossings[name] = Crossing(block=name, places=places, values=values)
        return args, kwargs


class _Passing:
    """Runs the forward as one stage does: what others hold answers NaN, as does what depends on it."""

    def __init__(self, rehearsal: Rehearsal, answers: Mapping[str, tuple[Any, ...]], stage: int) -> None:
        self._rehearsal, self._answers, self._stage = rehearsal, answers, stage
        self._cut = rehearsal._cut
        self._calls: dict[str, int] = {}
        self._arrived: dict[int, Tensor] = {}  # what crossed, by the id of what stands for it, which it keeps alive
        self.crossing: Crossing | None = None

    def entered(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        index = self._cut.blocks.index(name) if name in self._cut.blocks else None
        start, end = self._cut.held(self._stage).start, self._cut.held(self._stage).stop
        leaves, _ = tree_flatten((args, kwargs))
        nowhere = [place for place, leaf in enumerate(leaves) if _is_nowhere(leaf)]
        if index is not None and index == start and index and self.crossing is None:  # the first call of several
            values = tuple(Value.of(leaves[place]) for place in nowhere)
            self.crossing = Crossing(block=name, places=tuple(nowhere), values=values)
            self._arrived = {id(leaves[place]): leaves[place] for place in nowhere}
        elif self._rehearsal._holds(self._stage, name) or index == end:
            loose = [place for place in nowhere if id(leaves[place]) not in self._arrived]
            if loose:
                raise NotSupportedError(
                    f"stage {self._stage} calls {name} with a {_shown(leaves[loose[0]])} that only another stage can "
                    f"compute, and that does not reach {self._cut.blocks[start]}, the first block of the stage; name "
                    "what computes it in Stages(everywhere=...), or use pipeline_parallel_size=1"
                )
        if index is not None and index == end:
            raise Reached
        return args, kwargs

    def answered(self, name: str, forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = self._rehearsal._holds(self._stage, name)
        of_part = self._answers[name]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        return answer(of_part[call % len(of_part)], self._rehearsal._device, _SOMETHING if here else NOWHERE)


class _OnMeta(TorchDispatchMode):
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


def names_of_parts(model: nn.Module, cut: Cut) -> dict[str, str]:
    """Return the first of all names of each part of ``model``; a module may have several."""
    first: dict[int, str] = {}
    names = {}
    for name in cut.parts():
        owner, _, leaf = name.rpartition(".")
        holder = model.get_submodule(owner)
        value = getattr(holder, leaf)
        names[name] = name if not isinstance(value, nn.Module) else first.setdefault(id(value), name)
    return names


def modules_of_parts(model: nn.Module, cut: Cut) -> Iterator[tuple[str, nn.Module]]:
    """Yield those parts of ``model`` that are modules."""
    for name in cut.parts():
        owner, _, leaf = name.rpartition(".")
        value = getattr(model.get_submodule(owner), leaf)
        if isinstance(value, nn.Module):
            yield name, value


def _on_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)


def _any_on_meta(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_flatten(tree)[0])


def _is_nowhere(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return False
    local = local_tensor(leaf)
    return not local.is_meta and bool(local.isnan().any())


def _shown(tensor: Tensor) -> str:
    return f"tensor {tuple(tensor.shape)}"
