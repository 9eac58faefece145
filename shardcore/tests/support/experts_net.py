"""A small stack with mixtures of experts, in the forms that their weights take, and its policy."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tiny import randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore import Policy
from shardcore.mesh.context import context_of
from shardcore.policy import Stages
from shardcore.styles import experts, norm, partial, replicate, sequence
from shardcore_testing.parity import assert_close, assert_same_parameters, whole

WIDTH, INNER, EXPERTS, TOP = 6, 11, 5, 2  # 11 columns divide by no number of ranks
#: How the weights lie: one tensor for all experts, the same transposed, or a list of modules.
KINDS = ("stacked", "transposed", "list")
#: Other forms of one tensor for all experts.
FORMS = ("in turns", "ungated")


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        return logits, *routed(logits)


def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, places = logits.softmax(-1).topk(TOP, -1)
    return top / top.sum(-1, keepdim=True), places


class Stacked(nn.Module):
    def __init__(self, transposed: bool, inner: int = INNER) -> None:
        super().__init__()
        shapes = (EXPERTS, 2 * inner, WIDTH), (EXPERTS, WIDTH, inner)
        self.is_transposed, self.num_experts = transposed, EXPERTS
        up, down = ((e, b, a) for e, a, b in shapes) if transposed else shapes
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.empty(up)), nn.Parameter(torch.empty(down))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.dtypes = hidden_states.dtype, top_k_weights.dtype
        out = torch.zeros_like(hidden_states)
        for i in range(self.num_experts):
            tokens, place = torch.where(top_k_index == i)
            up, down = self.gate_up_proj[i], self.down_proj[i]
            if self.is_transposed:
                up, down = up.T, down.T
            gate, value = F.linear(hidden_states[tokens], up).chunk(2, -1)
            made = F.linear(F.silu(gate) * value, down) * top_k_weights[tokens, place, None]
            out.index_add_(0, tokens, made.to(out.dtype))
        return out


class InTurns(Stacked):
    """As those of gpt-oss: gate and up take turns, as the gate shows, and both matrices have biases."""

    def __init__(self) -> None:
        super().__init__(True, inner=12)  # ranks divide it: a gate stays with what it lets pass
        self.gate_up_proj_bias = nn.Parameter(torch.empty(EXPERTS, 24))
        self.down_proj_bias = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for i in range(self.num_experts):
            tokens, place = torch.where(top_k_index == i)
            up = hidden_states[tokens] @ self.gate_up_proj[i] + self.gate_up_proj_bias[i]
            made = self._apply_gate(up) @ self.down_proj[i] + self.down_proj_bias[i]
            out.index_add_(0, tokens, made * top_k_weights[tokens, place, None])
        return out

    def _apply_gate(self, up: Tensor) -> Tensor:
        return F.silu(up[..., ::2]) * up[..., 1::2]


class Ungated(nn.Module):
    """As those of Nemotron-H: one matrix up, one down."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for i in range(EXPERTS):
            tokens, place = torch.where(top_k_index == i)
            made = F.linear(F.silu(F.linear(hidden_states[tokens], self.up_proj[i])), self.down_proj[i])
            out.index_add_(0, tokens, made * top_k_weights[tokens, place, None])
        return out


class Expert(nn.Module):
    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Routes as the releases of transformers do: experts in one module get the routing, a list is walked through."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        listed = kind == "list"
        self.gate = nn.Linear(WIDTH, EXPERTS) if listed else Router()
        own = {"in turns": InTurns, "ungated": Ungated}.get(kind, lambda: Stacked(kind == "transposed"))
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS)) if listed else own()
        self.shared_expert, self.shared_gate = Expert(), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = hidden.view(-1, WIDTH)
        shared = self.shared_gate(x).sigmoid() * self.shared_expert(x)
        if not isinstance(self.experts, nn.ModuleList):
            _, weights, places = self.gate(x)
            return (self.experts(x, places, weights) + shared).view(hidden.shape)
        logits = self.gate(x)
        weights, places = routed(logits)
        for i, expert in enumerate(self.experts):
            tokens, place = torch.where(places == i)
            if not tokens.numel():
                continue  # as in transformers 4: the expert is not called
            shared = shared.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return shared.view(hidden.shape), logits


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture(kind)

    def forward(self, x: Tensor) -> Tensor:
        out = self.mixture(self.norm(x))
        return x + (out[0] if isinstance(out, tuple) else out)


class Stack(nn.Module):
    recomputed: bool | None = None  # reentrant or not; None: nothing is

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks, self.last = nn.ModuleList(Block(kind) for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.recomputed is None else checkpoint(block, x, use_reentrant=self.recomputed)
        return self.last(x)


class MixturePolicy(Policy):
    stages = Stages(first="first", blocks="blocks", last="last")
    rule = experts(
        "mixture",
        captured=0,
        col=("w1", "w3"),
        row="w2",
        shared_col=("shared_expert.w1", "shared_expert.w3"),
        shared_row="shared_expert.w2",
    )
    of_shared_gate = partial("mixture.shared_gate")

    def module_policy(self):
        return {
            "Stack": [replicate("first"), norm("last"), sequence(scatter="blocks[0]", gather="last")],
            "Block": [norm("norm"), self.rule, self.of_shared_gate],
        }


def build(kind: str, seed: int = 0) -> Stack:
    model = Stack(kind).double()
    randomize(model, seed)
    return model


def twins(kind: str, **fields) -> tuple[Stack, Stack]:
    reference = build(kind)
    return reference, shardcore.shard(copy.deepcopy(reference), policy=MixturePolicy, **fields)


def captured(model: Stack) -> list[Tensor]:
    """Return the list to which forwards add the logits of all routers."""
    found: list[Tensor] = []
    for block in model.blocks:
        listed = isinstance(block.mixture.experts, nn.ModuleList)
        module, place = (block.mixture, 1) if listed else (block.mixture.gate, 0)
        module.register_forward_hook(lambda _, __, out, place=place: found.append(out[place]))
    return found


def batch(step: int = 0, rows: int = 3, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(50 + step)
    return torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)


def balance(logits: list[Tensor]) -> Tensor:
    """Return a balancing loss, which needs the routing of all tokens at once."""
    scores = torch.cat(logits).softmax(-1)
    chosen = F.one_hot(scores.topk(TOP, -1).indices, EXPERTS).sum(1).to(scores.dtype)
    return (scores.mean(0) * chosen.mean(0)).sum() * 20


def trains(kind, folder, fields, source):
    """Train two steps and save, or, from a checkpoint of another run, two more; compare both with one rank."""
    reference = build(kind)
    model = shardcore.shard(build(kind, seed=0 if source is None else 9), policy=MixturePolicy, **fields)
    both = reference, model
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4) for net in both]
    context = context_of(model)
    parts, part = context.sizes.replicas, context.replica
    for step in range(4):
        if source is not None and step == 2:
            shardcore.load_checkpoint(source, model, optimizers[1])
        norms = []
        for net, optimizer in zip(both, optimizers, strict=True):
            if net is model and source is not None and step < 2:
                continue
            x = batch(step, rows=4)
            net(x if net is reference else x.chunk(parts)[part]).pow(3).mean().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(net.parameters(), 0.05)).detach())
            optimizer.step()
            optimizer.zero_grad()
        if len(norms) == 2:
            assert_close(norms[0], norms[1], "norm of all gradients")
            assert_same_parameters(reference, model)
        if source is None and step == 1:
            shardcore.save_checkpoint(folder, model, optimizers[1])
