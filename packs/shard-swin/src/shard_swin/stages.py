"""Words for stages that have heads of different numbers, of which the ranks may divide some."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from shardcore import ShardContext
from shardcore.nn import ParallelMixin
from shardcore.policy import Rule, Scope, Word
from shardcore.styles import replicate


@dataclass(frozen=True, slots=True)
class HeadsOfStages:
    """A check that the ranks can share the heads of a stage, at least of one: else all attention would be whole.

    Attributes:
        heads: the attribute of the model with the numbers of heads, such as ``"config.num_heads"``; ``"*"`` is every
            module of a list.
        uneven: ranks may have unequal numbers of heads.
    """

    heads: str
    uneven: bool = False

    def problem(self, model: nn.Module, ranks: int) -> tuple[str, str] | None:
        """Return what is wrong and what to do, or None."""
        counts = list(_found(model, self.heads))
        if any(_can_share(count, ranks, uneven=self.uneven) for count in counts):
            return None
        what = f"of stages with {', '.join(map(str, counts))} heads ({self.heads}) none can be split over {ranks} ranks"
        if self.uneven:
            return what, f"use a tensor_parallel_size of at most {max(counts)}"
        return what, "use a tensor_parallel_size that divides the heads of one of them"


def _found(owner: Any, path: str) -> Iterator[int]:
    name, _, rest = path.partition(".")
    for value in owner.children() if name == "*" else [getattr(owner, name)]:
        if rest:
            yield from _found(value, rest)
        else:
            yield from [value] if isinstance(value, int) else value


def shared(count: str, *rules: Rule, whole: str = "attention", uneven: bool = False) -> Rule:
    """Say ``rules`` of layers whose heads or channels the ranks can share; elsewhere every rank has all of them.

    Args:
        count: the attribute of a layer that counts them.
        *rules: what is split, and the attributes that count it.
        whole: the module that every rank has whole elsewhere.
        uneven: ranks may have unequal numbers of them.
    """

    def plan(scope: Scope) -> None:
        shares = _can_share(operator.attrgetter(count)(scope.module), scope.ranks, uneven=uneven)
        for rule in rules if shares else (replicate(whole),):
            rule.plan(scope)

    return Word(text=f"shared({count!r}, {', '.join(map(str, rules))})", planned=plan)


def _can_share(count: int, ranks: int, *, uneven: bool) -> bool:
    return count >= ranks if uneven else count % ranks == 0


class StageAttentions(ParallelMixin):
    """An encoder of stages, or one stage of it, that gathers attention weights (..., heads/tp, N, N) over their heads.

    An encoder returns them by name, a tensor for each stage; a stage last in a tuple, behind three others.

    Options:
        split: of each stage, whether its heads are split; else every rank has all of them.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"split": "_split"}
    plan_gathers: ClassVar[tuple[str, ...]] = ("attentions",)

    _split: tuple[bool, ...] = ()
    _ranks: DeviceMesh

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context, **options)
        new.__dict__["_ranks"] = context.tp
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward and gather what it captured."""
        out = super().forward(*args, **kwargs)
        if type(out) is tuple:
            return (*out[:_OF_A_STAGE], *(self._whole(weights, self._split[0]) for weights in out[_OF_A_STAGE:]))
        if out.attentions:  # none where an attention implementation returns none
            out.attentions = tuple(map(self._whole, out.attentions, self._split))
        return out

    def _whole(self, weights: Tensor, split: bool) -> Tensor:
        if not split:
            return weights
        return DTensor.from_local(weights, self._ranks, [Shard(1)], run_check=False).full_tensor()


#: What a stage returns before its attention weights: states, states before patches are merged, the size of the image.
_OF_A_STAGE = 3


def stage_attentions(heads: str) -> Rule:
    """Gather the attention weights of stages with heads of different numbers, of which the ranks may divide some.

    For an encoder that returns them by name, one for each of its ``layers``, or for a stage that returns them last.

    Args:
        heads: the attribute of a layer (``blocks[0]`` of a stage) that counts its heads.
    """

    def plan(scope: Scope) -> None:
        stages: Any = getattr(scope.module, "layers", (scope.module,))
        split = tuple(operator.attrgetter(heads)(stage.blocks[0]) % scope.ranks == 0 for stage in stages)
        if any(split):
            scope.swap("", StageAttentions, split=split)

    return Word(text=f"stage_attentions({heads!r})", planned=plan)
