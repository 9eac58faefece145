"""Which stage of a pipeline holds what of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardcore.config import ShardConfig
from shardcore.config.pipelining import chunks_of
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.plan.stages import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The blocks of a model, in the order in which they run, and where stages begin.

    Attributes:
        stages: the parts of the model, by names that it has.
        blocks: the names of all blocks.
        bounds: stage ``k`` holds ``blocks[bounds[k]:bounds[k + 1]]``.
    """

    stages: Stages
    blocks: tuple[str, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, stages: Stages, number: int, *, bounds: Sequence[int] | None = None) -> Cut:
        """Cut ``model``, of which only sizes are read, into ``number`` stages.

        ``bounds`` are where stages begin, and the number of blocks at the end. By default the work of the busiest stage
        is the least that can be had, as far as parameters tell it.

        Raises:
            ConfigError: there are fewer blocks than stages, or ``bounds`` leaves a stage without blocks.
            NotSupportedError: the stages have several gaps, and do not say which of them holds what is ``between``.
        """
        lists = [(name, model.get_submodule(name)) for name in stages.lists]
        blocks = tuple(f"{name}.{child}" for name, blocks in lists for child, _ in blocks.named_children())
        if not 1 <= number <= len(blocks):
            raise ConfigError(
                f"{type(model).__name__} has {len(blocks)} blocks ({', '.join(stages.lists) or 'none is named'}), "
                f"which cannot fill {number} stages; use a pipeline_parallel_size of at most {max(1, len(blocks))}"
            )
        if len(lists) > 2 and any(part == "between" for part, _ in stages.parts()):
            raise NotSupportedError(
                f"Stages of {type(model).__name__} names {len(lists)} lists of blocks, and does not say between which "
                "of them 'between' is; use pipeline_parallel_size=1"
            )
        if bounds is None:
            work = [_work(model, [name]) for name in blocks]
            bounds = balanced(work, number, first=_at(model, stages, "first"), last=_at(model, stages, "last"))
        starts = tuple(bounds)
        whole = (starts[:1], starts[-1:]) == ((0,), (len(blocks),)) and len(starts) == number + 1
        if not whole or any(end <= start for start, end in itertools.pairwise(starts)):
            raise ConfigError(
                f"{number} stages of {len(blocks)} blocks cannot begin at {starts}: wanted {number + 1} growing "
                f"numbers from 0 to {len(blocks)}"
            )
        return cls(stages=stages, blocks=blocks, bounds=starts)

    @classmethod
    def by(cls, config: ShardConfig, model: nn.Module, stages: Stages | None) -> Cut:
        """Cut ``model`` as a configuration says; ``stages`` are None if its policy does not say where it can be cut.

        Raises:
            ConfigError: the model has too few blocks, or settings contradict each other.
            NotSupportedError: the policy does not say where the model can be cut.
        """
        if stages is None:
            raise NotSupportedError(
                f"the policy of {type(model).__name__} does not say where it can be cut; give it "
                "stages=shardcore.Stages(...)"
            )
        chunks = chunks_of(config.pipeline_schedule, config.num_model_chunks)
        return cls.of(model, stages, (config.pipeline_parallel_size or 1) * chunks, bounds=config.pipeline_bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def held(self, stage: int) -> range:
        """Return the numbers of the blocks that a stage holds."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def holder(self, name: str) -> int | None:
        """Return the stage that holds ``name``, an entry of the stages or a block; None if all do.

        What is between two lists of blocks is held where the last block before it is, so that what crosses to the next
        stage always is what its first block is called with.
        """
        if name in self.blocks:
            return self._of_block(self.blocks.index(name))
        part = next(part for part, other in self.stages.parts() if other == name)
        if part == "between":
            before = sum(1 for block in self.blocks if block.startswith(f"{self.stages.lists[0]}."))
            return self._of_block(before - 1)
        return {"first": 0, "last": len(self) - 1}.get(part)

    def parts(self) -> tuple[str, ...]:
        """Return every name that a stage holds or lacks: the blocks, and the entries around them."""
        around = [name for part, name in self.stages.parts() if part != "blocks"]
        return (*self.blocks, *around)

    def follows(self, block: str) -> bool:
        """Tell whether a block is called with what the block before it returned: it is not the first of its list."""
        number = self.blocks.index(block)
        return number > 0 and block.rpartition(".")[0] == self.blocks[number - 1].rpartition(".")[0]

    def _of_block(self, number: int) -> int:
        return next(stage for stage in range(len(self)) if number in self.held(stage))


def balanced(work: Sequence[float], number: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return where ``number`` stages begin so that the busiest has the least work, and of these the most even ones.

    ``work`` is that of each block, ``first`` and ``last`` what these stages do besides; each stage gets a block.
    """
    count, until = len(work), (0.0, *itertools.accumulate(work))

    def load(start: int, end: int, stage: int) -> float:
        around = (first if stage == 0 else 0.0) + (last if stage == number - 1 else 0.0)
        return until[end] - until[start] + around

    # For each block at which a stage may begin: the most work and the sum of squares from there on, and the beginnings.
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {start: (load(start, count, number - 1), load(start, count, number - 1) ** 2, (start, count))
            for start in range(number - 1, count)}  # fmt: skip
    for stage in reversed(range(number - 1)):
        best = {
            start: min(
                (max(own, most), own * own + squares, (start, *starts))
                for end, (most, squares, starts) in best.items()
                if end > start
                for own in (load(start, end, stage),)
            )
            for start in range(stage, count - (number - 1 - stage))
        }
    return best[0][2]


def shares(model: nn.Module, cut: Cut) -> list[float]:
    """Return the share of each stage in the work of all of them, as `Cut.of` counts it; ``model`` is the whole one."""
    work = [sum(_work(model, [cut.blocks[block]]) for block in cut.held(stage)) for stage in range(len(cut))]
    work[0] += _at(model, cut.stages, "first")
    work[-1] += _at(model, cut.stages, "last")
    total = sum(work)
    return [own / total if total else 1 / len(cut) for own in work]


def _at(model: nn.Module, stages: Stages, end: str) -> float:
    return _work(model, [name for part, name in stages.parts() if part == end])


def _work(model: nn.Module, names: Sequence[str]) -> float:
    """Return how many numbers of the parameters of ``names`` are multiplied with each token; tables are looked up."""
    held: dict[int, int] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        holder = model.get_submodule(owner)
        if leaf in holder._parameters or leaf in holder._buffers:
            continue
        for module in model.get_submodule(name).modules():
            if not isinstance(module, nn.Embedding):
                held |= {id(p): p.numel() for p in module._parameters.values() if p is not None and p.ndim > 1}
    return float(sum(held.values()))
