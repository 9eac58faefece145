"""How a model is to be sharded."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import fill, indent
from typing import Any, Literal, Self, get_args

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import shardcore
from shardcore.config.pipelining import PIPELINE_FIELDS, SCHEDULE_NAMES, SPLIT_SCHEDULES
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.config.sizes import SIZES, check_experts, check_place, fill_in, sizes_of_place
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import Sizes, build_mesh, group_of, mesh_of_group
from shardcore.mesh.context import ContextMode, PartialGradients
from shardcore.transfer.products import Overlap

#: Short names of `shardcore.shard`, and the fields they stand for.
SHORT_NAMES = {
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "cp": "context_parallel_size",
}

# Values that a field can have at all, where that is a short list.
_CHOICES = {
    "partial_gradients": get_args(PartialGradients),
    "context_parallel_mode": get_args(ContextMode),
    "pipeline_schedule": (None, *SCHEDULE_NAMES),
    "enable_sequence_overlap": get_args(Overlap),
}

# Fields that are None, or of a class, and how that is said.
_CLASSES: dict[str, tuple[type[Any], str]] = {
    "device_mesh": (DeviceMesh, "a DeviceMesh or None"),
    "gradient_checkpoint_config": (GradientCheckpointConfig, "a GradientCheckpointConfig or None"),
    "tensor_parallel_process_group": (ProcessGroup, "a process group that this rank belongs to, or None"),
}

#: Kinds of flash attention, by the names that libraries of models give them.
ATTENTIONS = ("flash_attention_4", "flash_attention_3", "flash_attention_2", "xformers")

SWITCHES = ("enable_flash_attention", "enable_fused_normalization", "enable_jit_fused")

#: Off, on, or on wherever it is possible. None is off, and ``"auto"`` under ``enable_all_optimization``.
Switch = bool | Literal["auto"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """How a model is to be sharded. Sizes count ranks; ``None`` is derived from the number of ranks.

    After Shardformer's ``ShardConfig`` (ColossalAI).

    Attributes:
        tensor_parallel_size: ranks that share every layer. Default: the number of ranks divided by
            ``data_parallel_size``, which must be an integer.
        data_parallel_size: model replicas, each with other data; the product of the two fields below.
        dp_replicate_size: replicas with full parameters, whose gradients are averaged. Default: ``data_parallel_size``
            divided by ``dp_shard_size`` if both are given, else 1.
        dp_shard_size: ranks over which parameters, gradients and optimizer state are sharded by FSDP2. Default: all
            data-parallel ranks.
        pipeline_parallel_size: ranks among which the blocks of the model are divided; each holds one stage of a
            pipeline, or several. Default: 1. The model then has ``train_step`` and ``eval_step``.
        expert_parallel_size: of the ``dp_shard_size`` times ``context_parallel_size`` ranks, which it divides, so many
            share the experts of a model: each has whole ones, and tokens travel. Default: 1, every one has all experts.
        context_parallel_size: ranks that divide the tokens of each batch, which all of them are given whole, from the
            first block to the last. They shard parameters by FSDP2 together with ``dp_shard_size``. Default: 1.
        context_parallel_mode: how tokens of different ranks attend to each other: ``"all_to_all"`` (each rank has all
            tokens of some heads), ``"ring_attn"`` (keys and values go from neighbour to neighbour), or ``"auto"``, the
            first as far as there are heads, and the second for the rest.
        tensor_parallel_process_group: the tensor-parallel ranks, if they are not all of the default process group.
            Only its members call `shardcore.shard`; data parallelism is the caller's.
        device_mesh: a mesh made by the caller, with an axis ``tp`` and at most ``pp``, ``dp_replicate``, ``dp_shard``
            besides.
        inference_only: for evaluation: parameters get ``requires_grad=False``, the model is in eval mode, and nothing
            is stored or sent for a backward.
        parallel_output: in calls with labels, logits stay split over the vocabulary, and each rank computes its part of
            the loss; ``logits`` of the output is a DTensor (on one rank a plain tensor). False: every rank gets the
            full logits.
        loss_chunk_size: with ``parallel_output``: the number of tokens whose logits are computed at a time, inside the
            loss, and again in the backward. The full logits never exist, and the output has none. None: all at once.
        enable_flash_attention: flash attention, through the model's library. True is the newest of the flash-attn
            packages that is installed and runs on this card, else torch's own kernels, and raises with the reason where
            none is possible; ``"auto"`` uses flash-attn where it is possible. ``"flash_attention_4"``,
            ``"flash_attention_3"`` and ``"flash_attention_2"`` are that version or an error; ``"xformers"`` is torch's
            memory-efficient kernel (the same as xformers').
        enable_fused_normalization: torch's fused norms. True raises where no fused form of a norm is known; ``"auto"``
            keeps the native norm there. None is ``"auto"`` for weights of 16 bits on several tensor-parallel ranks.
        enable_jit_fused: blocks are compiled by `torch.compile` while training, which fuses bias and GELU into one
            kernel, and bias, dropout and residual into another. Needs what torch's compiler needs (on the CPU a C++
            compiler). True raises where that is missing, or the policy does not name its blocks; ``"auto"`` is False.
        enable_sequence_parallelism: outside regions, activations are split along the sequence over the tensor-parallel
            ranks; calls with fewer tokens than ranks are not split.
        sequence_keep_gathered: keep the gathered input of each region for the backward. False: gather it again there,
            which costs two more all-gathers for each layer and stores split activations only.
        enable_sequence_overlap: with sequence parallelism, in training: tokens travel in pieces, and linears multiply
            one while the next is under way. ``"symm_mem"``: torch does it, on cards that read each other's memory.
        enable_all_optimization: every switch above that is None becomes ``"auto"``: optimizations that are possible are
            used, others are left out without an error. Never turns sequence parallelism on.
        gradient_checkpoint_config: which blocks are recomputed in the backward.
        pipeline_schedule: ``"gpipe"``, ``"1f1b"`` (the default), ``"interleaved"``, ``"looped_bfs"``,
            ``"interleaved_zero_bubble"``, ``"zbv"`` or ``"dualpipev"``.
        num_model_chunks: stages of each rank; by default 2 where the schedule has several, else 1.
        num_microbatches: micro-batches of a batch; by default 2 for each rank of the pipeline.
        microbatch_size: rows of each micro-batch, in place of their number.
        pipeline_bounds: the numbers of the blocks at which stages begin, and at the end how many blocks there are; by
            default the work of stages is even.
        extra_kwargs: further settings for the policy; one that the policy does not read is an error.
        check_inputs_every: tensor-parallel ranks compare the inputs of the first three calls, of the fourth,
            eighth, sixteenth and so on, of each call whose number this divides, and what the next generation begins
            with: another batch on each rank is an error on all of them. 0: never.
        fp8_communication: activations between tensor-parallel ranks and between stages (e4m3, their gradients in e5m2),
            and parameters that FSDP2 gathers, travel in 8 bits with a scale for each part: half the bytes of bfloat16,
            rounded. Outputs, losses and gradients of parameters travel as they are.
        partial_gradients: ``"in_backward"`` sums the partial gradients of replicated parameters inside each backward;
            ``"deferred"`` leaves them to one `shardcore.reduce_partial_gradients` for each step.

    Raises:
        ConfigError: a value is of the wrong kind, or fields contradict each other.
        NotSupportedError: fields do not work together.
    """

    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    pipeline_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    context_parallel_size: int | None = None
    context_parallel_mode: ContextMode = "auto"
    tensor_parallel_process_group: ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None
    inference_only: bool = False
    parallel_output: bool = False
    loss_chunk_size: int | None = None
    enable_flash_attention: Switch | str = None
    enable_fused_normalization: Switch = None
    enable_jit_fused: Switch = None
    enable_sequence_parallelism: bool = False
    sequence_keep_gathered: bool = True
    enable_sequence_overlap: Overlap = False
    enable_all_optimization: bool = False
    gradient_checkpoint_config: GradientCheckpointConfig | None = None
    pipeline_schedule: str | None = None
    num_model_chunks: int | None = None
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    pipeline_bounds: tuple[int, ...] | None = None
    extra_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    check_inputs_every: int = 100
    fp8_communication: bool = False
    partial_gradients: PartialGradients = "in_backward"

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_contradictions(self)
        check_place(self.device_mesh, self.tensor_parallel_process_group, {name: getattr(self, name) for name in SIZES})
        if (self.expert_parallel_size or 1) > 1:
            check_experts(self.device_mesh, self.tensor_parallel_process_group)

    @classmethod
    def of(cls, config: Self | None = None, **fields: Any) -> Self:
        """Return ``config`` with ``fields`` replaced; short names (tp, dp, pp, ep, cp) are understood.

        Raises:
            ConfigError: ``config`` is something else, or a field is unknown or given twice under two names.
        """
        if not isinstance(config, cls | None):
            raise ConfigError(f"wanted a ShardConfig, got {config!r}; sizes are given by name: tp=2, dp=2")
        known = {field.name for field in dataclasses.fields(cls)}
        full: dict[str, Any] = {}
        for name, value in fields.items():
            target = SHORT_NAMES.get(name, name)
            if target not in known:
                near = difflib.get_close_matches(name, names := sorted(known | SHORT_NAMES.keys()), n=1)
                listed = indent(fill(", ".join(names), 76), "  ")
                told = f"Did you mean {near[0]!r}?" if near else f"The fields are\n{listed}"
                raise ConfigError(f"unknown configuration field {name!r}. {told}")
            if target in full:
                raise ConfigError(f"{name!r} and another name for {target} were both given; give one of them")
            full[target] = value
        return dataclasses.replace(config or cls(), **full)

    @property
    def ranks(self) -> int:
        """The product of the sizes that are given: where some are None, the least number of ranks."""
        given = self._given_sizes
        tensor, data, replicate, shard, pipeline, context = (given[name] for name in SIZES)
        replicas = data or (replicate or 1) * (shard or self.expert_parallel_size or 1)
        return (tensor or 1) * replicas * (pipeline or 1) * (context or 1)

    @property
    def _given_sizes(self) -> dict[str, int | None]:
        return {**{name: getattr(self, name) for name in SIZES}, **self._sizes_of_place}

    @property
    def _sizes_of_place(self) -> dict[str, int]:
        return sizes_of_place(self.device_mesh, self.tensor_parallel_process_group)

    def mesh(self) -> DeviceMesh:
        """Return the caller's mesh, or make the one that a resolved configuration describes.

        Every rank of the caller's group, or of the default process group, has to call it.
        """
        if self.device_mesh is not None:
            return self.device_mesh
        if self.tensor_parallel_process_group is not None:
            return mesh_of_group(self.tensor_parallel_process_group)
        return build_mesh(self._sizes)

    @property
    def _sizes(self) -> Sizes:
        """The sizes of `mesh`, of a resolved configuration."""
        return Sizes(
            pp=self.pipeline_parallel_size or 1,
            dp_replicate=self.dp_replicate_size or 1,
            dp_shard=self.dp_shard_size or 1,
            cp=self.context_parallel_size or 1,
            tp=self.tensor_parallel_size or 1,
        )

    @property
    def parameter_shards(self) -> int:
        """The ranks over which FSDP2 shards the parameters of a resolved configuration, beside ``tp``."""
        return self._sizes.dp_shard * self._sizes.cp

    def parameter_mesh(self) -> DeviceMesh | None:
        """Return the mesh that the parameters of a resolved configuration lie on, if it is not `mesh`.

        Every rank of the default process group has to call it. The ranks of ``cp``, which have the same data, are among
        its ``dp_shard``: FSDP2 takes the mean of their gradients as it does of replicas'.
        """
        if self._sizes.cp == 1:
            return None
        return build_mesh(dataclasses.replace(self._sizes, dp_shard=self.parameter_shards, cp=1))

    def expert_mesh(self) -> DeviceMesh | None:
        """Return the mesh of the same ranks, with an axis ``ep``, that a resolved configuration describes.

        Every rank of the default process group has to call it. None where no rank has whole experts.
        """
        experts = self.expert_parallel_size or 1
        if experts == 1:
            return None
        return build_mesh(dataclasses.replace(self._sizes, dp_shard=self.parameter_shards // experts, cp=1, ep=experts))

    def group(self) -> ProcessGroup | None:
        """Return the ranks that shard a model together; None for the default process group.

        Every one of them has to call it: for a mesh, the group may have to be created.
        """
        if self.device_mesh is not None:
            return group_of(self.device_mesh)
        return self.tensor_parallel_process_group

    def resolve(self, world_size: int) -> ShardConfig:
        """Return the configuration with every size and switch filled in for ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not multiply to ``world_size``.
        """
        values: dict[str, Any] = {**fill_in(self._given_sizes, world_size, experts=self.expert_parallel_size or 1)}
        for name in SWITCHES:
            if getattr(self, name) is None:  # which the word for norms understands
                default = None if name == "enable_fused_normalization" else False
                values[name] = "auto" if self.enable_all_optimization else default
        return dataclasses.replace(self, **values)


def _check_kinds(config: ShardConfig) -> None:
    """Refuse values of the wrong kind."""

    def require(name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ConfigError(f"ShardConfig.{name} must be {wanted}, got {getattr(config, name)!r}")

    for entry in dataclasses.fields(config):
        name, value = entry.name, getattr(config, entry.name)
        if name.endswith("_size") or name in ("num_microbatches", "num_model_chunks"):
            require(name, value is None or (type(value) is int and value >= 1), "a positive integer or None")
        if type(entry.default) is bool and name not in _CHOICES:
            require(name, isinstance(value, bool), "True or False")
        if name in SWITCHES:
            named = ATTENTIONS if name == "enable_flash_attention" else ()
            words = ", ".join(map(repr, ("auto", *named)))
            require(name, value in ("auto", *named) or isinstance(value, bool | None), f"True, False, {words} or None")
        if name in _CHOICES:
            require(name, value in _CHOICES[name], f"one of {', '.join(map(repr, _CHOICES[name]))}")
        if name in _CLASSES:
            kind, wanted = _CLASSES[name]
            require(name, isinstance(value, kind | None), wanted)
    every = config.check_inputs_every
    require("check_inputs_every", type(every) is int and every >= 0, "a number of calls, or 0 for never")
    bounds = config.pipeline_bounds
    require(
        "pipeline_bounds",
        bounds is None or (isinstance(bounds, tuple) and all(type(bound) is int for bound in bounds)),
        "a tuple of the numbers of blocks at which stages begin, with the number of blocks at its end, or None",
    )
    require("extra_kwargs", isinstance(config.extra_kwargs, Mapping), "a mapping of names to values")


def _check_contradictions(config: ShardConfig) -> None:
    data, replicate, shard = config.data_parallel_size, config.dp_replicate_size, config.dp_shard_size
    if data and replicate and shard and data != replicate * shard:
        raise ConfigError(
            f"ShardConfig.data_parallel_size {data} is not dp_replicate_size {replicate} times dp_shard_size "
            f"{shard}; leave one of the three None"
        )
    if config.loss_chunk_size is not None and not config.parallel_output:
        raise ConfigError(
            f"ShardConfig.loss_chunk_size={config.loss_chunk_size} without parallel_output=True: gathered logits are "
            "not computed in chunks; give both or neither"
        )
    if config.enable_sequence_overlap and not config.enable_sequence_parallelism:
        raise ConfigError(
            "ShardConfig.enable_sequence_overlap without enable_sequence_parallelism=True says nothing: no tokens "
            "travel; give both or neither"
        )
    _check_pipeline(config)
    _check_context(config)
    if config.inference_only and config.gradient_checkpoint_config is not None:
        raise ConfigError(
            "ShardConfig.gradient_checkpoint_config contradicts inference_only=True: without a backward there is "
            "nothing to recompute; give one of them"
        )


def _check_context(config: ShardConfig) -> None:
    """Refuse what nothing divides along the sequence, and modes of what is not divided."""
    ranks = config.context_parallel_size or 1
    if ranks == 1:
        if config.context_parallel_mode != "auto":
            raise ConfigError(
                f"ShardConfig.context_parallel_mode={config.context_parallel_mode!r} without context parallelism says "
                "nothing; give context_parallel_size too, or leave it 'auto'"
            )
        return
    _refuse_beside(
        f"context_parallel_size={ranks}",
        "leave one of them out (sizes, such as tp= and dp=, say what a mesh would)",
        enable_jit_fused=config.enable_jit_fused is True,
        enable_flash_attention=config.enable_flash_attention is True,
        device_mesh=config.device_mesh is not None,
        tensor_parallel_process_group=config.tensor_parallel_process_group is not None,
    )


def _refuse_beside(other: str, todo: str, **asked: bool) -> None:
    """Refuse the first field that is ``asked`` for beside the ``other``, with which none of them works."""
    for name, is_asked in asked.items():
        if is_asked:
            raise NotSupportedError(
                f"ShardConfig.{name} together with {other} is not supported by shardcore {shardcore.__version__}; "
                f"{todo}"
            )


def _check_pipeline(config: ShardConfig) -> None:
    given = [name for name in PIPELINE_FIELDS if getattr(config, name) is not None]
    stages = config.pipeline_parallel_size or config._sizes_of_place.get("pipeline_parallel_size", 1)
    if stages == 1:
        if given:
            raise ConfigError(
                f"ShardConfig.{given[0]} without a pipeline says nothing; give pipeline_parallel_size too, or leave it "
                "None"
            )
        return
    if config.num_microbatches is not None and config.microbatch_size is not None:
        raise ConfigError(
            f"ShardConfig.num_microbatches={config.num_microbatches} and microbatch_size={config.microbatch_size} both "
            "divide a batch; give one of them"
        )
    _refuse_beside(
        f"pipeline_parallel_size={stages}",
        "leave one of them out",
        expert_parallel_size=(config.expert_parallel_size or 1) > 1,
        enable_jit_fused=config.enable_jit_fused is True,
        loss_chunk_size=config.loss_chunk_size is not None,
        sequence_keep_gathered=not config.sequence_keep_gathered and config.pipeline_schedule in SPLIT_SCHEDULES,
        enable_sequence_overlap=bool(config.enable_sequence_overlap) and config.pipeline_schedule in SPLIT_SCHEDULES,
        tensor_parallel_process_group=config.tensor_parallel_process_group is not None,
    )
