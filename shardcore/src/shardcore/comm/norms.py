"""The norm of all gradients of a model whose parameters lie on several meshes.

Experts of which ranks have whole ones lie on another mesh than everything else. torch stacks the norms of all gradients
to take the norm of these, and scales all gradients at once; DTensors of several meshes can be neither (2.11 to 2.14).
`install` lets it do both mesh by mesh, for the whole process: `torch.nn.utils.clip_grad_norm_`, and what calls it,
works as ever. With one mesh everything is passed on to torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from shardcore._private import CLIPPING, complaint, missing, require

_INSTALLED = "_shardcore_several_meshes"

Tensors: TypeAlias = Tensor | Iterable[Tensor]


def torch_lacks() -> str | None:
    """Say why gradients on several meshes cannot be clipped with this torch, or return None if they can."""
    gone = missing(CLIPPING)
    return complaint(gone) if gone else None


def install() -> None:
    """Let torch clip gradients on several meshes by one norm; the first call acts, the others do nothing."""
    module: Any = clip_grad
    public: Any = torch.nn.utils
    if hasattr(module, _INSTALLED):
        return
    require(CLIPPING)
    setattr(module, _INSTALLED, True)
    public.get_total_norm = module._get_total_norm = _norm_of_norms(module._get_total_norm)
    public.clip_grads_with_norm_ = module._clip_grads_with_norm_ = _mesh_by_mesh(module._clip_grads_with_norm_)


def _norm_of_norms(native: Any) -> Any:
    """Return torch's function, which is called for the tensors of each mesh where there are several."""

    @functools.wraps(native)
    def total_norm(
        tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        tensors = _listed(tensors)
        groups = _by_mesh(tensors, tensors)
        if len(groups) > 1:
            norms = [native(group, norm_type, False, foreach) for group in groups]
            # Of plain tensors torch's own says what it always says of a norm that is not finite.
            tensors = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        out: Tensor = native(tensors, norm_type, error_if_nonfinite, foreach)
        return out

    return total_norm


def _mesh_by_mesh(native: Any) -> Any:
    """Return torch's function, which is called for the parameters of each mesh."""

    @functools.wraps(native)
    def clip_grads_with_norm(
        parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        found = [p for p in _listed(parameters) if p.grad is not None]
        groups = _by_mesh(found, [p.grad for p in found])
        if len(groups) > 1 and isinstance(total_norm, DTensor):
            total_norm = total_norm.full_tensor()
        for group in groups:
            native(group, max_norm, total_norm, foreach)

    return clip_grads_with_norm


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _by_mesh(tensors: list[Tensor], like: list[Any]) -> list[list[Tensor]]:
    """Return ``tensors`` by the mesh that those of ``like`` lie on; plain ones are with those of the first."""
    meshes = [tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in like]
    first = next((mesh for mesh in meshes if mesh is not None), None)
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor, mesh in zip(tensors, meshes, strict=True):
        groups.setdefault(first if mesh is None else mesh, []).append(tensor)
    return list(groups.values())
