"""A model whose parallel modules are a user's own, and its policy, written the way Shardformer's are."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import batch, randomize
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.comm.collectives import Channel, copy_to_tp, gather_from_tp
from shardcore.mesh.context import context_of
from shardcore.nn import ParallelModule
from shardcore.policy import Policy
from shardcore.styles import norm
from shardcore_shardformer import (
    Linear1D_Col,
    Linear1D_Row,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    VocabParallelEmbedding1D,
)

# --- a plain model, and a policy as people wrote them for Shardformer ---


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * self.scale


class ParallelMixer(ParallelModule):
    """A user's own module, with plain local parameters."""

    @staticmethod
    def from_native_module(module, process_group, **kwargs):
        new = ParallelMixer()
        new.group, new.width, new.kwargs = process_group, module.bias.numel(), kwargs
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        new.weight = nn.Parameter(module.weight.detach().chunk(world)[rank].clone())
        new.bias = nn.Parameter(module.bias.detach().chunk(world)[rank].clone())
        new.scale = nn.Parameter(module.scale.detach().clone())
        return new

    def forward(self, x):
        assert not isinstance(self.weight, DTensor), "it computes on local tensors"
        out = F.linear(copy_to_tp(x, Channel(self.group)), self.weight, self.bias)
        return gather_from_tp(out, Channel(self.group), -1, self.width) * self.scale


class Gain(nn.Module):
    """Acts on split activations, so its parameter has to be cut by hand."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.gain


class PlainBlock(nn.Module):
    def __init__(self, width=8, inner=24):
        super().__init__()
        self.parts = 4
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.gain = Gain(inner)
        self.down = nn.Linear(inner, width)
        self.mixer = Mixer(width)

    def scaled(self, x):
        return x * 3 / x.size(-1)

    def forward(self, x):
        x = self.norm(x)
        h = self.gain(F.silu(self.gate(x)) * self.up(x))
        h = self.scaled(h.unflatten(-1, (self.parts, -1)).softmax(-1).flatten(-2))
        return self.mixer(self.down(h))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))
        self.out = nn.Linear(8, 13, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def cut_gain(module, process_group):
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    module.gain = nn.Parameter(module.gain.detach().chunk(world)[rank].clone())


def scaled_by_the_whole(self, x):
    return x * 3 / self.down.in_features


class ShardformerStyle(Policy):
    def module_policy(self):
        world = dist.get_world_size()
        return {
            PlainBlock: ModulePolicyDescription(
                attribute_replacement={"parts": self.model.blocks[0].parts // world},
                sub_module_replacement=[
                    SubModuleReplacementDescription("gate", Linear1D_Col),
                    SubModuleReplacementDescription("up", Linear1D_Col, {}),
                    SubModuleReplacementDescription("down", Linear1D_Row),
                    SubModuleReplacementDescription("mixer", ParallelMixer, {"note": [1, 2]}),
                    SubModuleReplacementDescription("dropout", Linear1D_Col, None, True),
                ],
                method_replacement={"scaled": scaled_by_the_whole},
            ),
            Gain: ModulePolicyDescription(param_replacement=[cut_gain]),
            Plain: ModulePolicyDescription(
                sub_module_replacement=[
                    SubModuleReplacementDescription("table", VocabParallelEmbedding1D),
                    SubModuleReplacementDescription("out", Linear1D_Col, {"gather_output": True}),
                ]
            ),
            nn.LayerNorm: [norm("")],
        }


def plain():
    model = Plain().double()
    randomize(model)
    return model


def train(model, seed=0, vocab=13):
    ids = batch(seed, vocab=vocab)
    out = model(ids)
    (out.tanh() * torch.linspace(-1, 2, vocab, dtype=torch.float64)).sum().backward()
    return out


def kinds_of(model):
    return [(n, type(m), len(m._forward_pre_hooks)) for n, m in model.named_modules()]


def assert_unchanged(model, kinds, values):
    assert kinds_of(model) == kinds
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert all(torch.equal(values[n], p) for n, p in model.state_dict().items())
    assert context_of(model) is None
