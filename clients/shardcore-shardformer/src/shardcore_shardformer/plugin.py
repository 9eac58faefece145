"""How a model is trained over ranks: `HybridParallelPlugin`, pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardcore._env import torchrun
from shardcore.config.pipelining import PIPELINE_FIELDS, SPLIT_SCHEDULES
from shardcore.config.shard_config import SHORT_NAMES
from shardcore.config.sizes import SIZES
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.policy import Policy
from shardcore_shardformer.config import CONTEXT_MODES, ShardConfig, first_names

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Fields of `ShardConfig` that say who shares a model, or are of no use in a training.
_NOT_HERE = {
    *SIZES,
    *SHORT_NAMES,
    "device_mesh",
    "enable_tensor_parallelism",
    "expert_parallel_size",
    "inference_only",
    "pipeline_schedule",
    "pipeline_stage_manager",
    "tensor_parallel_process_group",
}


@dataclass(frozen=True, kw_only=True)
class HybridParallelPlugin:
    """Tensor, pipeline, sequence and data parallelism, mixed precision and clipping of one training.

    After ColossalAI's ``HybridParallelPlugin``.

    Attributes:
        tp_size: ranks that share every layer.
        pp_size: ranks among which the blocks are divided.
        dp_size: replicas with data of their own; by default as many as the other sizes leave of the ranks.
        ep_size: replicas that share the experts of a mixture, each with whole ones.
        sp_size: ranks that share each sequence, with ``enable_sequence_parallelism=True``: ``tp_size``, which share it
            between layers (``sequence_parallelism_mode="split_gather"``), or, with ``"all_to_all"`` and
            ``"ring_attn"``, any number of ranks of their own, which divide it inside attention too.
        zero_stage: what replicas divide (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). 0: nothing. 1:
            the optimizer's state, gradients and parameters between steps; gradients are summed once for each batch. 2:
            the same, and gradients are summed, and divided, in the backward of each micro-batch; not with a pipeline,
            which would send them as many times. 3: parameters are gathered for each block, forward and backward; not
            with schedules that split the backward.
        precision: ``"fp32"`` computes in the model's own dtype; ``"bf16"`` and ``"fp16"`` compute in that, with
            parameters, gradients and optimizer in the model's.
        initial_scale: of the loss under ``"fp16"``.
        growth_factor: of the scale, after ``growth_interval`` steps without an overflow.
        backoff_factor: of the scale, after one.
        growth_interval: number of steps.
        min_scale: the least scale.
        max_norm: gradients are clipped to this norm of the whole model; 0 for no clipping.
        num_microbatches: micro-batches of a batch.
        microbatch_size: rows of each, in place of their number.
        pp_style: the schedule, as `ShardConfig.pipeline_schedule` has it.
        custom_policy: a policy, instead of that of an installed pack.
        settings: all further arguments, which are fields of `shardcore_shardformer.ShardConfig`: switches such as
            ``enable_all_optimization``, ``num_model_chunks`` and ``pipeline_bounds``, ``gradient_checkpoint_config``.

    Raises:
        ConfigError: arguments contradict each other.
        NotSupportedError: something cannot exist; says why.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int | None = None
    ep_size: int | None = None
    sp_size: int | None = None
    zero_stage: Literal[0, 1, 2, 3] = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    min_scale: float = 1.0
    max_norm: float = 0.0
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    pp_style: str = "1f1b"
    custom_policy: Policy | type[Policy] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(self, *, settings: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        own = {entry.name: entry.default for entry in dataclasses.fields(self) if entry.name != "settings"}
        settings = {**(settings or {}), **{name: arguments.pop(name) for name in [*arguments] if name not in own}}
        if here := sorted(_NOT_HERE & settings.keys()):
            raise ConfigError(
                f"HybridParallelPlugin({here[0]}=) is not said here: who shares a model follows from tp_size, pp_size, "
                "dp_size, ep_size, zero_stage and pp_style; leave it out"
            )
        if settings.get("sequence_parallelism_mode") in CONTEXT_MODES:
            settings["context_parallel_size"] = arguments.get("sp_size")
        settings = first_names(settings)
        settings.pop("context_parallel_size", None)  # it is `sp_size`
        for name, value in {**own, **arguments, "settings": settings}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        def refuse(wrong: bool, text: str, kind: type[Exception] = ConfigError) -> None:
            if wrong:
                raise kind(f"HybridParallelPlugin({text}")

        for name in ("tp_size", "pp_size"):
            size = getattr(self, name)
            refuse(type(size) is not int or size < 1, f"{name}={size!r}) must be a positive integer")
        refuse(self.zero_stage not in (0, 1, 2, 3), f"zero_stage={self.zero_stage!r}) must be 0, 1, 2 or 3")
        refuse(
            self.precision not in _PRECISIONS, f"precision={self.precision!r}) must be one of {', '.join(_PRECISIONS)}"
        )
        refuse(
            self.zero_stage == 2 and self.pp_size > 1,
            "zero_stage=2) with a pipeline does not exist: gradients of micro-batches would be summed one by one, "
            "which sends them as many times; use zero_stage=1, which divides the same between steps",
            NotSupportedError,
        )
        refuse(
            self.zero_stage == 3 and self.pp_size > 1 and self.pp_style in SPLIT_SCHEDULES,
            f"zero_stage=3) with pp_style={self.pp_style!r}, which computes gradients of inputs and of parameters "
            "apart, would lose the second ones: use zero_stage=1, or pp_style='1f1b'",
            NotSupportedError,
        )
        shared = self.sp_size not in (None, 1) and self._context == 1
        refuse(
            shared and self.sp_size != self.tp_size,
            f"sp_size={self.sp_size}) other than tp_size {self.tp_size}: sequences are shared by the tensor-parallel "
            "ranks; others divide them by sequence_parallelism_mode='all_to_all' or 'ring_attn'",
            NotSupportedError,
        )
        refuse(
            shared and not self.settings.get("enable_sequence_parallelism"),
            f"sp_size={self.sp_size}) says nothing without enable_sequence_parallelism=True; give both",
        )
        for name in ("initial_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale"):
            refuse(getattr(self, name) <= 0, f"{name}={getattr(self, name)!r}) must be positive")
        refuse(self.max_norm < 0, f"max_norm={self.max_norm!r}) must be at least 0")
        self.config()  # whose own rules hold

    @property
    def replicas(self) -> int:
        """The replicas that there are on as many ranks as were started."""
        job = None if dist.is_initialized() else torchrun()
        ranks = dist.get_world_size() if dist.is_initialized() else 1 if job is None else job.world_size
        return self.dp_size or max(1, ranks // (self.tp_size * self.pp_size * self._context))

    @property
    def _context(self) -> int:
        """The ranks that divide each sequence, inside attention too."""
        return (self.sp_size or 1) if "context_parallel_mode" in self.settings else 1

    def config(self) -> ShardConfig:
        """Return the configuration of `shardcore.shard`."""
        fields = dict(self.settings)
        if self.pp_size > 1:
            fields |= {"pipeline_schedule": self.pp_style}
            fields |= {"num_microbatches": self.num_microbatches, "microbatch_size": self.microbatch_size}
        else:
            fields = {name: value for name, value in fields.items() if name not in PIPELINE_FIELDS}
        sizes: dict[str, Any] = {"tp": self.tp_size, "pp": self.pp_size, "dp": self.replicas, "ep": self.ep_size}
        if self._context > 1:
            sizes["cp"] = self._context
        if self.zero_stage == 0:
            sizes["dp_shard_size"] = 1  # whole replicas
        return ShardConfig.of(**sizes, **fields)

    @property
    def division(self) -> dict[str, int | None]:
        """How batches are divided, as arguments of `shardcore.pipeline.micro_batches`."""
        number = None if self.microbatch_size is not None else self.num_microbatches
        if number is None and self.microbatch_size is None:
            number = 2 * self.pp_size if self.pp_size > 1 else 1  # as a pipeline does by itself
        return {"number": number, "size": self.microbatch_size}

    def wrap(self) -> dict[str, Any]:
        """Return the options of FSDP2 that `shardcore.shard` is given as ``wrap``."""
        options: dict[str, Any] = {}
        if self.replicas == 1:
            pass  # there is nobody to divide anything among
        elif self.zero_stage in (1, 2):
            options["reshard_after_forward"] = False
        elif self.zero_stage == 3 and self.pp_size > 1:
            options["reshard_after_forward"] = True
        if (dtype := _PRECISIONS[self.precision]) is not None:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        return options
