"""Calls of the functions that tensors of parts are served with, of a matrix (4, 4), by the functions' names."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


def numbers(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


OTHER = numbers(4, 4, seed=4).abs() + 1
#: What is served of a divided tensor -> a call of it, or calls.
CALLS = {
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "transpose": lambda t: t.transpose(0, -1),
    "permute": lambda t: t.permute(1, 0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "__len__": len,
    "to": lambda t: t.to(torch.float32),
    "__eq__": lambda t: t == OTHER,
    "pow": (lambda t: t**3, lambda t: t.pow(2)),
    "clamp": lambda t: t.clamp(min=0.7),
    "__rsub__": lambda t: 1 - t,
    "__rdiv__": lambda t: 1 / t,
    "where": lambda t: torch.where(t > 1, t, t * 2),
    "masked_fill": lambda t: t.masked_fill(t > 1, 0.5),
    "lerp": lambda t: t.lerp(OTHER, 0.3),
    "addcmul": lambda t: torch.addcmul(OTHER, t, OTHER),
    "addcdiv": lambda t: torch.addcdiv(OTHER, OTHER, t),
    "linear": (lambda t: F.linear(OTHER, t, OTHER[0]), lambda t: F.linear(t, OTHER)),
    "embedding": lambda t: F.embedding(torch.tensor([[0, 3], [3, 1]]), t),
    "addmm": (lambda t: torch.addmm(t, t, OTHER), lambda t: torch.addmm(OTHER, OTHER, t)),
    "layer_norm": (lambda t: F.layer_norm(t, (4,)), lambda t: F.layer_norm(t, (4,), OTHER[0], OTHER[1])),
    "_foreach_norm": lambda t: torch.stack(
        [each.to_replicate() if hasattr(each, "to_replicate") else each for each in torch._foreach_norm([t, t])]
    ),
    "linalg_vector_norm": lambda t: torch.linalg.vector_norm(t, 1),
}
_OF_TWO = ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "mm", "matmul"]
_ALONG = ["sum", "mean", "var", "logsumexp", "softmax", "log_softmax", "norm", "any", "all"]


def calls_of(name):
    if name in CALLS:
        return CALLS[name] if isinstance(CALLS[name], tuple) else (CALLS[name],)
    function = getattr(torch.Tensor, name, getattr(F, name, None)) or getattr(torch, name)
    if name in _OF_TWO:
        return lambda t: function(t, OTHER), lambda t: function(t, t.T), lambda t: function(OTHER, t)
    if name in _ALONG:
        whole = () if "softmax" in name or name == "logsumexp" else (function,)
        return *whole, *(functools.partial(_along, function, dim) for dim in (0, 1))
    return (function,)


def _along(function, dim, t):
    return function(t, dim=dim)
