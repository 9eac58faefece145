"""A weight of 4 bits, without ranks: its parts, its products, and what is written into it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardcore.errors import NotSupportedError

pytest.importorskip("bitsandbytes", reason="weights are packed by bitsandbytes, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from bitsandbytes.functional import dequantize_4bit
from four_bits import packed  # from support/

from shardcore_quantized import Weight4Bit


def weight(rows: int = 6, columns: int = 256, kind: str = "nf4") -> tuple[Weight4Bit, Tensor]:
    made = packed(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)), kind)
    return Weight4Bit.of(made.weight, None), dequantize_4bit(made.weight.data, made.weight.quant_state)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_parts_have_the_values_of_the_whole(kind):
    own, values = weight(kind=kind)
    for part, wanted in [
        (own[2:5], values[2:5]),
        (own[:, 64:192], values[:, 64:192]),
        (own.narrow(1, 128, 128).clone(), values[:, 128:]),
        (torch.cat([own[4:], own[:2]]), torch.cat([values[4:], values[:2]])),
        (own[1:3].to(torch.float64), values[1:3].double()),
        (copy.deepcopy(own), values),
    ]:
        assert isinstance(part, Weight4Bit)
        assert part.dequantize().equal(wanted)
        assert (part.shape, part.dtype) == (wanted.shape, wanted.dtype)
        assert part.packed.numel() * 2 == part.numel() == part.scales.numel() * 64
    assert (own * 2).equal(values * 2)  # whatever else is done reads the values


def test_products_are_those_of_bitsandbytes():
    made = packed(torch.randn(32, 128, generator=torch.Generator().manual_seed(0))).train()
    own, x = Weight4Bit.of(made.weight, None), torch.randn(2, 3, 128, requires_grad=True)
    grad = torch.randn(2, 3, 32)
    wanted = made(x)
    assert torch.nn.functional.linear(x, own).equal(wanted)
    wanted.backward(grad)
    assert torch.allclose(grad @ own, x.grad, rtol=0, atol=1e-5)
    total = torch.ones(6, 128)
    assert torch.allclose(total.addmm_(grad.view(6, 32), own), 1 + x.grad.view(6, 128), rtol=0, atol=1e-5)


def test_what_is_written_is_quantized_as_before_and_never_lost():
    own, values = weight()
    own.copy_(2 * values)
    assert torch.allclose(own.dequantize(), 2 * values, rtol=0, atol=1e-6)
    own[2:4].copy_(values[2:4])
    assert torch.allclose(own.dequantize()[1:5], torch.cat([2 * values[1:2], values[2:4], 2 * values[4:5]]), atol=1e-6)
    with pytest.raises(NotSupportedError, match="a write is lost"):
        own[:, 64:].copy_(values[:, 64:])
    with pytest.raises(NotSupportedError, match="a write is lost"):
        own[:, 64:].detach().copy_(values[:, 64:])
    plain = torch.zeros_like(values)
    assert plain.copy_(own).equal(own.dequantize())
    assert plain.sub_(own).count_nonzero() == 0
    with pytest.raises(NotSupportedError, match="would write into a weight of 4 bits"):
        own.zero_()


def test_a_cut_inside_of_a_block_is_refused():
    own, _ = weight()
    with pytest.raises(NotSupportedError, match=r"columns 0 to 96 begin or end inside of one.*multiples of 64"):
        own[:, :96]
    with pytest.raises(NotSupportedError, match=r"rows 1 to 6 .*multiples of 2"):
        weight(columns=32)[0][1:]
