"""What ``explain`` says first: what each rank holds and sends, in a few lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardcore.config import ShardConfig
from shardcore.errors import ShardcoreError
from shardcore.nn.layout import ReplicatedLayout
from shardcore.plan import ParameterPlan, ShardPlan
from shardcore.policy import Policy
from shardcore_cli.tables import in_words, say
from shardcore_planner import Collective, Estimate, Workload, estimate
from shardcore_planner.calls import call_of
from shardcore_planner.memory import bytes_on


def tell_quantized(model: nn.Module) -> nn.Module:
    """Return ``model``; say first that weights which its configuration quantizes are counted as if it did not."""
    quantized = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantized is not None:
        known = quantized if isinstance(quantized, dict) else vars(quantized)
        kind = known.get("quant_method", "of an unknown kind")
        say(f"note: quantization_config ({kind}) is not planned: weights are counted as if not quantized", err=True)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What becomes of some of the parameters.

    Attributes:
        what: in words.
        count: how many they are.
        whole: their bytes in the unsharded model.
        held: their bytes on the first tensor-parallel rank.
    """

    what: str
    count: int
    whole: int
    held: int


def shares(plan: ShardPlan) -> list[Share]:
    """Return what is split, what is replicated, and what a user's callable lays out; those that there are."""
    ranks = plan.config.tensor_parallel_size or 1
    by_kind: dict[str, list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        by_kind.setdefault(_kind(parameter, ranks), []).append(parameter)
    return [
        Share(
            what=kind,
            count=len(found),
            whole=sum(_bytes(parameter) for parameter in found),
            held=sum(bytes_on(parameter, ranks, 0) for parameter in found),
        )
        for kind, found in sorted(by_kind.items(), key=lambda item: item[0] != "split over tp")
    ]


def _kind(parameter: ParameterPlan, ranks: int) -> str:
    if parameter.layout is None:
        return "laid out by user code"
    return "whole on each rank" if ranks == 1 or isinstance(parameter.layout, ReplicatedLayout) else "split over tp"


def _bytes(parameter: ParameterPlan) -> int:
    dtype: torch.dtype = getattr(torch, parameter.dtype.removeprefix("torch."))
    return math.prod(parameter.shape) * dtype.itemsize


def batch_of(config: ShardConfig, given: int | None) -> int:
    """Return the samples of each replica in a step: what was given, or one; of a pipeline, one in each micro-batch."""
    ranks = config.pipeline_parallel_size or 1
    if given is not None or ranks == 1:
        return given or 1
    return (config.num_microbatches or 2 * ranks) * (config.microbatch_size or 1)


def step_of(native: nn.Module, config: ShardConfig, policy: type[Policy] | None = None) -> Estimate | str:
    """Return what a step takes, in the dtype that the model's configuration says, or why that is not known."""
    optimizer = "none" if config.inference_only else "adamw"
    workload = Workload(batch=batch_of(config, None), optimizer=optimizer)
    try:
        return estimate(native, config, workload, call_of, policy=policy)
    except ShardcoreError as error:
        return str(error).partition("\n")[0]


def summary(
    plan: ShardPlan, held: Sequence[int], sent: Sequence[Collective], step: Estimate | str, *, staged: bool
) -> Iterator[str]:
    """Yield the lines.

    Args:
        plan: of the whole model.
        held: the bytes of parameters on each rank.
        sent: the collectives of a step.
        step: what one takes, or why that is not known.
        staged: the model is cut into stages.
    """
    low, high = in_words(min(held)), in_words(max(held))
    size = high if low == high else f"{low} to {high}"
    shards = plan.config.dp_shard_size or 1
    whole = sum(_bytes(parameter) for parameter in plan.parameters)
    over = f", divided by {shards} over dp_shard" if shards > 1 else ""
    dtypes = " and ".join(dict.fromkeys(parameter.dtype.removeprefix("torch.") for parameter in plan.parameters))
    yield f"parameters per rank: {size} of {in_words(whole)}{over}{f', in {dtypes}' * bool(dtypes)}"
    if not staged:
        for share in shares(plan):
            weights = f"{share.count} weight{'s' * (share.count != 1)}"
            yield f"    {share.what}: {weights}, {in_words(share.held)} of {in_words(share.whole)}"
    counts = Counter((c.phase, c.operation) for c in sent)
    words = (f"{count} {operation} {phase}" for (phase, operation), count in sorted(counts.items(), reverse=True))
    of = "collectives of all stages, for each micro-batch" if staged else "collectives per step"
    yield f"{of}: {', '.join(words) or 'none'}"
    yield f"bytes of a step: not known ({step})" if isinstance(step, str) else _of_a_step(step, dtypes)


def _of_a_step(step: Estimate, dtypes: str) -> str:
    work = step.workload
    samples = f"{work.batch} sample{'s' * (work.batch != 1)}"
    tokens = f" of {work.seq} tokens" if work.seq else ""
    own = "" if str(work.torch_dtype).removeprefix("torch.") in dtypes else ", since no dtype is configured"
    run = f"{samples}{tokens}, all in {work.dtype}{own}, " + (f"with {work.optimizer}" if work.trains else "inference")
    return (
        f"bytes of a step: each rank sends {in_words(step.sent)}, and holds {in_words(step.peak)} at the peak ({run})"
    )
