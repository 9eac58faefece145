"""Optimizers that cannot step DTensors: on whole tensors or on local parts they do what they do unsharded."""

from __future__ import annotations

import copy
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import shardcore
from shardcore import ConfigError, NotSupportedError
from shardcore._torch import SCALES_PARTIAL
from shardcore.mesh.context import context_of
from shardcore.nn import libraries
from shardcore_loop import LocalParts, WholeTensors
from shardcore_testing.parity import assert_close, assert_same_parameters


class Rows(torch.optim.Optimizer):
    """Shampoo-like: looks at rows and columns of whole tensors, and counts its steps in its groups."""

    def __init__(self, params, lr=1e-2, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad if p.ndim > 1 else p.grad[None]
                state = self.state[p]
                if not state:
                    state["left"] = torch.eye(grad.size(0), dtype=p.dtype)
                    state["norms"] = torch.zeros(grad.size(1), dtype=p.dtype)
                state["left"].add_(grad @ grad.T)
                state["norms"].mul_(0.9).add_(grad.norm(dim=0))
                move = torch.linalg.solve(state["left"], grad) / (1 + state["norms"]) / group["step"]
                p.sub_(group["lr"] * group["scale"] * move.reshape(p.shape))


def undecayed(model):
    """Two groups, as recipes make them."""
    thin = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": thin, "weight_decay": 0.0}]


KINDS = {
    "Adafactor": (torch.optim.Adafactor, WholeTensors, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adafactor, one by one": (torch.optim.Adafactor, WholeTensors, {"lr": 1e-2, "one_by_one": True}),
    "Rows": (Rows, WholeTensors, {}),
    "Rows, one by one": (Rows, WholeTensors, {"scale": 2.0, "one_by_one": True}),
    "Rprop": (torch.optim.Rprop, LocalParts, {"lr": 1e-3}),
    "AdamW": (torch.optim.AdamW, LocalParts, {"lr": 1e-2, "eps": 1e-3, "foreach": True}),
    "SGD, fused": (torch.optim.SGD, LocalParts, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}
MESHES = {"tp2": (2, {"tp": 2}), "tp2 dp2": (4, {"tp": 2, "dp": 2})}


def made(name, model):
    kind, how, settings = KINDS[name]
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return how(kind, undecayed(model), **settings)
    return kind(undecayed(model), **{k: v for k, v in settings.items() if k != "one_by_one"})


def frozen(model):
    """The bias of a key's norm has no true gradient, and these optimizers divide by its rounding errors."""
    for name, p in model.named_parameters():
        p.requires_grad_("k_norm.bias" not in name)
    return model


def step(model, optimizer, number, ids=None):
    ids = batch(number, rows=4) if ids is None else ids
    optimizer.zero_grad()
    model(ids).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


def part(model, number):
    context = context_of(model)
    return batch(number, rows=4).chunk(context.sizes.replicas)[context.replica]


def steps(name, fields):
    reference, model = frozen(build()), frozen(shardcore.shard(build(), policy=TinyPolicy, **fields))
    optimizers = [made(name, each) for each in (reference, model)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in optimizers]
    for number in range(3):
        wanted = step(reference, optimizers[0], number)
        assert_close(wanted, step(model, optimizers[1], number, part(model, number)), "norm")
        for schedule in schedules:
            schedule.step()
        assert_same_parameters(reference, model)
    # Its state, there and back, through each of the ways that a training takes; the training goes on as it would have.
    other = frozen(shardcore.shard(build(seed=1), policy=TinyPolicy, **fields))
    second = made(name, other)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    shardcore.save_checkpoint(folder[0], model, optimizers[1], step=3)
    shardcore.load_checkpoint(shardcore.latest(folder[0]), other, second)
    third = made(name, other)
    third.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))  # else they share it
    fourth = made(name, other)
    set_optimizer_state_dict(other, fourth, copy.deepcopy(get_optimizer_state_dict(model, optimizers[1])))
    start = {key: value.clone() for key, value in other.state_dict().items()}
    wanted = step(reference, optimizers[0], 3)
    for optimizer in (second, third, fourth):
        other.load_state_dict(start)
        assert_close(wanted, step(other, optimizer, 3, part(other, 3)), "norm after the checkpoint")
        assert_same_parameters(reference, other)


def all_kinds(fields, names):
    for name in names:
        steps(name, fields)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "names"),
    [("tp2", list(KINDS)), ("tp2 dp2", ["Adafactor, one by one", "AdamW"])],
    ids=["tp2", "dp2"],
)
def test_steps_as_unsharded(pool, mesh, names):
    world, fields = MESHES[mesh]
    pool.run(all_kinds, fields, names, world=world, timeout=180)


def search(fields):
    reference, model = build(), shardcore.shard(build(), policy=TinyPolicy, **fields)
    settings = {"max_iter": 4, "line_search_fn": "strong_wolfe"}
    losses = []
    for each in (reference, model):
        whole = each is reference
        kind = torch.optim.LBFGS
        optimizer = kind(each.parameters(), **settings) if whole else WholeTensors(kind, each.parameters(), **settings)

        def closure(each=each, optimizer=optimizer, whole=whole):
            optimizer.zero_grad()
            loss = each(batch(rows=4) if whole else part(each, 0)).pow(2).mean()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0][1] < losses[0][0]
    assert_same_parameters(reference, model)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_a_search_along_lines(pool, mesh):
    world, fields = MESHES[mesh]
    pool.run(search, fields, world=world)


def memory():
    model = shardcore.shard(build(), policy=TinyPolicy, tp=2)
    optimizer = WholeTensors(torch.optim.Adafactor, model.parameters())
    held = []
    native = torch.optim.Adafactor.step
    step(model, optimizer, 0)
    for stand_in in optimizer._stand_ins.values():
        held.append(stand_in.untyped_storage().nbytes())
        assert stand_in.grad is None
    assert native is torch.optim.Adafactor.step
    return max(held)


def test_between_steps_whole_tensors_are_gone(pool):
    assert pool.run(memory, world=2) == [8, 8]  # a number


UNABLE = (
    (torch.optim.Adafactor, "WholeTensors"),
    (torch.optim.LBFGS, "WholeTensors"),
    (torch.optim.Rprop, "LocalParts"),
    *(  # of a library that is not installed here
        (type(name, (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.of", "args": args}), word)
        for name, args, word in (
            ("AdamW", SimpleNamespace(optim_bits=32), "LocalParts"),
            ("AdamW8bit", SimpleNamespace(optim_bits=8), "WholeTensors"),
            ("LAMB", SimpleNamespace(optim_bits=32), "WholeTensors"),
        )
    ),
)


def refusals():
    model = shardcore.shard(build(), policy=TinyPolicy, tp=2)
    model(batch()).pow(2).mean().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for kind, word in UNABLE:
        optimizer = kind(model.parameters())
        with pytest.raises(NotSupportedError, match=rf"{kind.__name__} uses operations .* shardcore_loop\.{word}"):
            optimizer.step(lambda: 0.0)
    for key, value in model.state_dict().items():
        assert torch.equal(value.to_local(), before[key].to_local()), key
    plain = nn.Linear(2, 2)
    plain(torch.ones(2)).sum().backward()
    torch.optim.Rprop(plain.parameters()).step()  # not of a sharded model
    with pytest.raises(NotSupportedError, match="add_param_group"):
        LocalParts(torch.optim.SGD, model.head.parameters(), lr=0.1).add_param_group(
            {"params": [model.model.norm.weight]}
        )
    with pytest.raises(NotSupportedError, match="one_by_one"):
        WholeTensors(torch.optim.SGD, model.parameters(), lr=0.1, one_by_one=True).step(lambda: 0.0)
    with pytest.raises(ConfigError, match="empty"):
        WholeTensors(torch.optim.SGD, [], lr=0.1)


def test_what_they_cannot_do_is_refused_before_a_step(pool):
    pool.run(refusals, world=2)


def looks_at_more():
    """Optimizers that look at whole tensors say nothing of parts, so that the known ones are refused."""
    model = shardcore.shard(build(), policy=TinyPolicy, tp=2)
    thick = [p for p in model.parameters() if p.ndim > 1]
    answer = libraries._State.answer
    known = {"needs_of_optimizer": lambda optimizer: ("WholeTensors", "")}
    libraries.answered_by(lambda library, what: known.get(what) if library == "their_library" else None)
    theirs = type("Theirs", (torch.optim.SGD,), {"__module__": "their_library.optimizers"})
    kinds = [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, theirs]
    for kind in kinds:
        for made in (kind, lambda groups, kind=kind: kind(groups)):  # a function that makes one, too
            with pytest.raises(NotSupportedError, match=rf"^LocalParts\({kind.__name__}\): .*WholeTensors"):
                LocalParts(made, thick)
    LocalParts(torch.optim.LBFGS, [model.model.norm.weight])  # a part that is the whole
    LocalParts(Rows, thick)  # nobody knows
    libraries.answered_by(answer)


def test_parts_are_not_given_to_who_looks_at_more(pool):
    pool.run(looks_at_more, world=2)


def partial():
    model = shardcore.shard(build(), policy=TinyPolicy, tp=2, partial_gradients="deferred")
    model(batch()).pow(2).mean().backward()
    optimizer = LocalParts(torch.optim.SGD, model.parameters(), lr=0.1)
    # Where torch clips such gradients wrongly, no optimizer may step with them.
    with pytest.raises(ConfigError if SCALES_PARTIAL else NotSupportedError, match="reduce_partial_gradients"):
        optimizer.step()
    shardcore.reduce_partial_gradients(model)
    optimizer.step()


def test_partial_gradients_are_no_parts(pool):
    pool.run(partial, world=2)
