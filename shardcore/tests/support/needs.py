"""Marks of tests that need what not every supported release of torch can do."""

from __future__ import annotations

import pytest

from shardcore._torch import CAN_PIPELINE, CAN_TRACE
from shardcore.comm.strided import torch_lacks

__all__ = ["FUSED", "PIPELINES", "TRACES"]

#: Linears that several projections share, and experts' weights of [gate|up].
FUSED = pytest.mark.skipif(torch_lacks() is not None, reason="fused linears need torch 2.12")

#: Before, a stage has to return a gradient for token ids.
PIPELINES = pytest.mark.skipif(not CAN_PIPELINE, reason="pipelines need torch 2.13")

#: Before, graphs break where parameters are read.
TRACES = pytest.mark.skipif(not CAN_TRACE, reason="traced reads of parameters need torch 2.13")
