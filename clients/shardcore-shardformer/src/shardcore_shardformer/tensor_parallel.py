"""PyTorch's RFC of tensor parallelism by its own names: `parallelize_module` and its styles.

    import shardcore_shardformer.tensor_parallel as tp

    tp.parallelize_module(model, tp.PairwiseParallel(), device_mesh)

A style becomes the rules of a policy (`shardcore.shard(model, policy={path: word})`), with all their checks: a pair of
linears is one region, with one all-reduce in the forward and one in the backward. A transformer of ``torch.nn`` goes to
the pack that serves it, ``shard-torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardcore
from shardcore.errors import ConfigError
from shardcore.styles import attention, region

#: Makes what a module is called with, or returns, of it: of each tensor, the mesh, and the dim of it that is meant.
Prepare = Callable[[Tensor, DeviceMesh, int], Tensor]


class ParallelStyle:
    """How a module is divided over tensor-parallel ranks: it is given, and returns, whole tensors.

    Args:
        prepare_input: changes each tensor that the module is called with, on all ranks alike.
        prepare_output: changes what it returns.
    """

    word = "replicate"

    def __init__(self, prepare_input: Prepare | None = None, prepare_output: Prepare | None = None) -> None:
        self._prepare_input, self._prepare_output = prepare_input, prepare_output

    def said_of(self, part: nn.Module) -> Any:
        """Return what a policy as data says of a module: a word, or rules."""
        return self.word


class ColwiseParallel(ParallelStyle):
    """A linear whose outputs are divided, and gathered."""

    word = "colwise_gather_output"


class RowwiseParallel(ParallelStyle):
    """A linear whose inputs are divided, and its outputs summed."""

    word = "rowwise_split_input"


class PairwiseParallel(ParallelStyle):
    """Megatron-LM's pairs: linears whose outputs are divided, and the one that sums them.

    For attention, an MLP, a stack of linears in a `torch.nn.Sequential` (of an odd number the last one stays whole),
    `torch.nn.MultiheadAttention`, and, if it is the whole module, `torch.nn.Transformer`.
    """

    def said_of(self, part: nn.Module) -> Any:
        """Return a region for each pair, or the word for torch's attention."""
        if isinstance(part, nn.Sequential):
            linears = [name for name, child in part.named_children() if isinstance(child, nn.Linear)]
            return [region(col=a, row=b) for a, b in zip(linears[::2], linears[1::2], strict=False)]
        return attention("") if isinstance(part, nn.MultiheadAttention) else "pairwise"


PairwiseParallelStyle = PairwiseParallel
_COLUMNS, _PAIRS = ColwiseParallel(), PairwiseParallel()


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | ParallelStyle | Mapping[str, Any],
    parallelize_plan: ParallelStyle | Mapping[str, Any] | DeviceMesh,
    tp_mesh_dim: int = 0,
) -> nn.Module:
    """Divide a module over the ranks of one dim of a mesh, in place; mesh and plan come in either order.

    Args:
        module: a module without a policy, whose weights are alike on all ranks; or, with one `PairwiseParallel`, a
            module of torch.
        device_mesh: a mesh of one dim, or of two, of which the last one is meant. The first is that of replicas: apply
            `torch.distributed.fsdp.fully_shard` over it afterwards.
        parallelize_plan: a style of the module, or of its submodules by their paths: those of this module, words
            (``"colwise"``), and the styles of `torch.distributed.tensor.parallel`. What no path names stays whole.
        tp_mesh_dim: the dim.

    Returns:
        ``module``.

    Raises:
        ConfigError: the mesh has another form.
        PlanError: the module cannot be divided like that.
    """
    mesh, plan = device_mesh, parallelize_plan
    if not isinstance(mesh, DeviceMesh):
        mesh, plan = plan, mesh
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2) or tp_mesh_dim != mesh.ndim - 1:
        raise ConfigError(
            f"parallelize_module: a mesh of one dim, or of two with tp_mesh_dim=1, is wanted, got {mesh!r} with "
            f"tp_mesh_dim={tp_mesh_dim}; tensor-parallel ranks are neighbours"
        )
    styles: Mapping[str, Any] = plan if isinstance(plan, Mapping) else {"": plan}
    own_styles = {path: style for path, style in styles.items() if isinstance(style, ParallelStyle)}
    said = {path: style.said_of(module.get_submodule(path)) for path, style in own_styles.items()}
    own = isinstance(plan, PairwiseParallel) and type(module).__module__.startswith("torch.nn.")
    policy = None if own and not isinstance(module, nn.Sequential) else {**styles, **said}
    named = ("dp", "tp")[-mesh.ndim :]
    if mesh.mesh_dim_names != named:
        mesh = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=named)
    shardcore.shard(module, policy=policy, device_mesh=mesh, wrap=False)
    for path, style in own_styles.items():  # after what may be refused
        _prepare(module.get_submodule(path), style, mesh, tp_mesh_dim)
    return module


def _parallelize_mlp(
    module: nn.Module,
    device_mesh: DeviceMesh,
    parallel_style: ParallelStyle = _PAIRS,
    tp_mesh_dim: int = 0,
) -> nn.Module:
    """Divide linears in a row, or attention, as `parallelize_module` does."""
    return parallelize_module(module, device_mesh, parallel_style, tp_mesh_dim)


_parallelize_multihead_attn = _parallelize_mlp


def _parallelize_linear(
    module: nn.Module,
    device_mesh: DeviceMesh,
    parallel_style: ParallelStyle = _COLUMNS,
    tp_mesh_dim: int = 0,
) -> nn.Module:
    """Divide one linear as `parallelize_module` does."""
    return parallelize_module(module, device_mesh, parallel_style, tp_mesh_dim)


def _prepare(part: nn.Module, style: ParallelStyle, mesh: DeviceMesh, dim: int) -> None:
    before, after = style._prepare_input, style._prepare_output
    if before is not None:
        part.register_forward_pre_hook(
            lambda _, args: tuple(before(x, mesh, dim) if isinstance(x, torch.Tensor) else x for x in args)
        )
    if after is not None:
        part.register_forward_hook(lambda _, args, out: after(out, mesh, dim))
