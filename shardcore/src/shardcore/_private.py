"""What shardcore uses of torch that torch does not promise to keep, and what is said when one of it is gone.

Every private name of torch in the core is in `TORCH`; the kit's and those of libraries are in tables around the core. A
release that lacks a name makes `require` raise where the feature that needs it is asked for. `ABILITIES` are what an
older release does wrongly. ``shardcore doctor`` reports both. What is imported comes from `shardcore._torch`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from shardcore.errors import NotSupportedError

#: The first and the last series of torch that the tests have passed with.
TESTED = ("2.11", "2.14")

# What needs a name: it works as long as all of its names are there.
CORE = "everything"
DATA_PARALLEL = "data parallelism"
CONTEXT = "context parallelism"
PIPELINES = "data parallelism of a pipeline"
CLIPPING = "clipping the gradients of whole experts"
FUSED = "linears that fuse several segments"
SAVING = "saving"
LOADING = "models without values"
SCALING = "gradient scalers over ranks"
NUMBERS = "a warning of numbers of one rank's part"
SLICES = "refusing writes into copies"
DRAWS = "refusing random numbers that differ between ranks"
STEPS = "fused steps of optimizers"
KERNELS = "enable_sequence_overlap='symm_mem'"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name that its library does not promise to keep."""

    path: str  # the module or class that has it, and the name: ``"torch.nn.Module._parameters"``
    use: str  # what for
    feature: str = CORE  # what needs it
    since: str = ""  # the first release that has it, if that is not the first one that is supported
    until: str = ""  # the first release that does without it, and that is known to
    of_instances: bool = False  # instances have it, the class has not
    code: str = ""  # where the class cannot be asked, a function of the library that names it
    needed: bool = False  # releases before ``since`` lack what the feature needs
    older: str = ""  # another path that older releases have it under; one of the two is enough

    @property
    def name(self) -> str:
        """The name alone."""
        return self.path.rpartition(".")[2]

    def is_there(self) -> bool:
        """Tell whether the installed library has it."""
        owner = _found(self.path.rpartition(".")[0])
        if self.code:
            return self.name in getattr(getattr(_found(self.code), "__code__", None), "co_names", ())
        there = owner is not None and hasattr(owner() if self.of_instances else owner, self.name)
        return there or self.find() is not None  # a module that nobody has imported yet is no attribute

    def find(self) -> Any:
        """Return what the installed library has there, or None."""
        found = _found(self.path)
        return _found(self.older) if found is None and self.older else found


def _found(path: str) -> Any:
    """Return the module or attribute ``path``, or None."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return None


@dataclass(frozen=True, slots=True)
class Uses:
    """What shardcore uses of a library without a promise of its authors."""

    library: str  # the name that is imported
    tested: tuple[str, str]  # the first and the last release that the tests have passed with
    names: tuple[PrivateName, ...]

    def missing(self, *features: str) -> list[PrivateName]:
        """Return the names that the installed release should have and lacks, of ``features`` or of all."""
        here = self.release
        return [
            name
            for name in self.names
            if (not features or name.feature in features)
            and (name.needed or here >= Version(name.since or "0").release)
            and not (name.until and here >= Version(name.until).release)
            and not name.is_there()
        ]

    def require(self, *features: str) -> None:
        """Refuse ``features``, or all, if the installed release lacks a name that they need.

        Raises:
            NotSupportedError: it does; names the first one, the installed release and the tested range.
        """
        if gone := self.missing(*features):
            raise NotSupportedError(self.complaint(gone))

    def complaint(self, gone: Sequence[PrivateName]) -> str:
        """Say what the installed release lacks, and what to do."""
        here = importlib.import_module(self.library).__version__
        first, more = gone[0], f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        lacks = f"neither {first.path} nor {first.older}{more}, one" if first.older else f"no {first.path}{more}"
        since = f", which {self.library} has since {first.since}" if first.since else ""
        private = " of which is" if first.older else ": a private name,"
        too_old = first.since and self.release < Version(first.since).release
        wanted = f"{self.library} {first.since} or newer" if too_old else "a release of that range"
        return (
            f"{self.library} {here} has {lacks}{since}{private} needed by {first.feature} ({first.use}). "
            f"shardcore was tested with {self.library} {' to '.join(self.tested)}; install {wanted}"
        )

    @property
    def release(self) -> tuple[int, ...]:
        """The installed release."""
        return Version(importlib.import_module(self.library).__version__).release


_SPEC = "torch.distributed.tensor._dtensor_spec"
_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_COLLECTIVES = "torch.distributed._functional_collectives"
_MODULE = "torch.nn.Module"
_TENSOR = "torch.distributed.tensor.DTensor"
_C10D = "torch.distributed.distributed_c10d"
_TRACED = "collectives that torch.compile traces"
_CALLS = "calls of parts of a model that FSDP2 has wrapped"

_GATHERED = "collectives of whole tensors"
ALL_GATHER = PrivateName(
    "torch.distributed.all_gather_single", _GATHERED, older="torch.distributed.all_gather_into_tensor"
)
REDUCE_SCATTER = PrivateName(
    "torch.distributed.reduce_scatter_single", _GATHERED, older="torch.distributed.reduce_scatter_tensor"
)
SET_TIMEOUT = PrivateName(
    "torch.distributed.set_timeout", "the timeout of a new group", older=f"{_C10D}._set_pg_timeout"
)

_NAMES: tuple[PrivateName, ...] = (
    ALL_GATHER,
    REDUCE_SCATTER,
    SET_TIMEOUT,
    PrivateName(f"{_TENSOR}._local_tensor", "reading a parameter's part without a node in the graph"),
    PrivateName(f"{_TENSOR}._spec", "giving a gradient the layout of its parameter"),
    PrivateName(f"{_SPEC}.DTensorSpec", "the type of that layout"),
    PrivateName("torch.distributed.tensor.placement_types._StridedShard", "telling how often a dim is cut"),
    *(
        PrivateName(f"{_COLLECTIVES}.{name}", _TRACED)
        for name in ("all_gather_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")
    ),
    PrivateName("torch.distributed._symmetric_memory", "torch.ops.symm_mem", KERNELS),
    PrivateName("torch._C._current_graph_task_id", "telling whether a backward is running, and which"),
    PrivateName("torch._C._are_functorch_transforms_active", "refusing transforms of torch.func"),
    PrivateName("torch.autograd.Function._backward_cls._forward_cls", "telling what made a tensor in a region"),
    PrivateName("torch._subclasses.fake_tensor.FakeTensor", "leaving tensors alone that estimate memory"),
    PrivateName("torch.Tensor._version", "noticing that a weight was changed"),
    PrivateName("torch.Tensor._base", "giving FSDP2 outputs that are no views"),
    PrivateName("torch.Tensor._backward_hooks", "refusing parameters with hooks"),
    PrivateName("torch.Tensor._post_accumulate_grad_hooks", "refusing parameters with hooks"),
    PrivateName(f"{_MODULE}._parameters", "a module's own parameters, those that are None too", of_instances=True),
    PrivateName(f"{_MODULE}._buffers", "a module's own buffers", of_instances=True),
    PrivateName(
        f"{_MODULE}._modules", "a module's children, those that are None or there twice too", of_instances=True
    ),
    PrivateName(f"{_MODULE}._load_state_dict_pre_hooks", "splitting whole tensors as they load", of_instances=True),
    PrivateName("torch.distributed._composable.replicate_with_fsdp.replicate", "whole replicas", DATA_PARALLEL),
    PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", _CALLS, DATA_PARALLEL),
    PrivateName(f"{_FSDP}._fsdp_state.FSDPState._lazy_init", _CALLS, DATA_PARALLEL),
    *(
        PrivateName(f"{_FSDP}._fsdp_state.FSDPState.{name}", _CALLS, DATA_PARALLEL, of_instances=True)
        for name in ("_is_root", "_state_ctx", "_training_state")
    ),
    PrivateName(f"{_GROUP}._training_state", _CALLS, DATA_PARALLEL, code=f"{_GROUP}.__init__"),
    *(
        PrivateName(f"{_FSDP}._fsdp_state.FSDPState.{name}", _CALLS, DATA_PARALLEL, since, until, True)
        for name, since, until in (("_fsdp_param_group", "", "2.12"), ("_fsdp_param_groups", "2.12", ""))
    ),
    PrivateName(f"{_FSDP}._fsdp_state.FSDPState._root_post_backward_final_callback", "one sum for a step", PIPELINES),
    PrivateName(f"{_SPEC}._StridedShardNotDecodableError", "full_tensor of such tensors", FUSED, "2.12", needed=True),
    *(
        PrivateName(f"{_TENSOR}.{name}", "checkpoints of such tensors", FUSED)
        for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
    ),
    PrivateName("torch.distributed._state_dict_utils._distribute_tensors", "loading into such tensors", FUSED),
    PrivateName(f"{_FSDP}._fsdp_param.FSDPParam._init_sharded_param", "refusing to cut such tensors twice", FUSED),
    PrivateName(
        f"{_FSDP}._fsdp_param.FSDPParam._module_info",
        "naming them",
        FUSED,
        code=f"{_FSDP}._fsdp_param.FSDPParam.__init__",
    ),
    *(
        PrivateName(f"torch.nn.utils.clip_grad.{name}", "one norm of gradients on several meshes", CLIPPING)
        for name in ("_clip_grads_with_norm_", "_get_total_norm")
    ),
    PrivateName(f"{_C10D}._get_default_store", "the store that every process group has", SAVING),
    PrivateName(f"{_TENSOR}._op_dispatcher._custom_op_handlers", "seeing where they are taken", NUMBERS),
    PrivateName(f"{_TENSOR}._op_dispatcher._custom_op_handlers", "telling all ranks of an inf", SCALING),
    PrivateName(f"{_TENSOR}._op_dispatcher._custom_op_handlers", "seeing which slices are copies", SLICES),
    PrivateName("torch.ops.aten.alias.default._schema", "telling writes from other calls", SLICES),
    PrivateName(f"{_TENSOR}._op_dispatcher._custom_op_handlers", "seeing them as they are made", STEPS),
    PrivateName(f"{_TENSOR}._op_dispatcher._custom_op_handlers", "seeing draws before they are made", DRAWS),
    PrivateName(
        "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default", "telling all ranks of an inf", SCALING
    ),
    *(
        PrivateName(f"torch.ops.aten._scaled_dot_product_flash_attention{way}", "attention, and counting it", CONTEXT)
        for way in ("", "_backward", "_for_cpu", "_for_cpu_backward")
    ),
    PrivateName("torch.ops.aten._local_scalar_dense.default", "seeing where they are taken", NUMBERS),
    PrivateName("torch.distributed.ProcessGroup._get_backend", "the timeout of the process group"),
    PrivateName("torch._C._distributed_c10d.Backend.Options._timeout", "the timeout of the process group"),
    PrivateName("torch.ops.aten._grouped_mm", "knowing what experts return before they run", LOADING),
    PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "recording how values come about", LOADING),
    PrivateName("torch.utils._python_dispatch._disable_current_modes", "making such values", LOADING),
    PrivateName("torch.utils._pytree.tree_flatten", "finding tensors among arguments", LOADING),
    PrivateName("torch.ops.aten.alias.default._schema", "telling views and writes from other calls", LOADING),
    PrivateName("torch.ops.aten._to_copy", "following casts from a file to a parameter", LOADING),
    PrivateName("torch.ops.aten._unsafe_view", "following views from a file to a parameter", LOADING),
    PrivateName("torch.Tensor._make_wrapper_subclass", "tensors without values", LOADING),
)


TORCH = Uses("torch", TESTED, _NAMES)
missing, require, complaint = TORCH.missing, TORCH.require, TORCH.complaint


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that torch does rightly since a release that is not the first supported one."""

    what: str  # what it is for users
    since: str  # the first release that can
    lost: str  # what is lost, or refused, without it, and what to do

    def is_there(self) -> bool:
        """Tell whether the installed torch can."""
        return TORCH.release >= Version(self.since).release


# Traced by torch 2.11, `to_local` of a split parameter has a gradient that calls itself replicated.
TRACED_READS = Ability(
    "torch.compile in one graph",
    since="2.13",
    lost="graphs break wherever a sharded model reads its parameters, and fullgraph=True raises",
)

# To clip partial gradients torch multiplies them. 2.11 multiplies several of them at once (``_foreach_mul_``) by a part
# of the factor, so that they are hardly clipped.
CLIPPED_SUMS = Ability(
    "clipping of deferred gradients",
    since="2.13",
    lost="under partial_gradients='deferred' an optimizer refuses gradients that are not summed yet: call "
    "shardcore.reduce_partial_gradients(model) before clipping",
)

# Before, a stage of torch's pipelines has to return a gradient for whatever it was given, token ids too.
STAGES = Ability("pipelines", since="2.13", lost="pp= above 1 is refused: shard by tp= and dp= alone")

ABILITIES = (TRACED_READS, CLIPPED_SUMS, STAGES)
