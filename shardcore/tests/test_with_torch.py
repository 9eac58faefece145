"""What people do with a model in plain torch works with a sharded one, and gives what it gives the unsharded model."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from needs import TRACES
from tiny import TinyPolicy, batch, build, shard, twins
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import shardcore
from shardcore.apply import call_checks
from shardcore.comm.dtensor_params import splits_on_tp
from shardcore.errors import NotSupportedError, PlanError, ShardcoreWarning, WrapError
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole

TP2 = {"tp": 2}


def loss(model, number=0):
    ids = batch(number)
    return model(ids, labels=ids.roll(1, 1))


def train(model, steps=3, after=lambda: None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    for number in range(steps):
        optimizer.zero_grad()
        loss(model, number).backward()
        optimizer.step()
        after()
    return model


def averaged(models):
    """The exponential mean of the weights, as a copy that runs."""
    means = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) for model in models]
    for model, mean in zip(models, means, strict=True):
        train(model, after=lambda model=model, mean=mean: mean.update_parameters(model))
    assert_same_parameters(*means)
    assert_close(loss(means[0]), loss(means[1]), "loss of the mean")


def averaged_beside(fields):
    """Over replicas, whose model FSDP2 lets nobody copy, a second model is the mean."""
    reference = build()
    model, second = (shardcore.shard(build(), policy=TinyPolicy(), **fields) for _ in range(2))
    with pytest.raises(NotSupportedError, match=r"second\.load_state_dict\(model\.state_dict\(\)\)"):
        AveragedModel(model)
    nn.init.zeros_(next(second.parameters()))
    second.load_state_dict(model.state_dict())
    means = copy.deepcopy(reference), second
    for each, mean in zip((reference, model), means, strict=True):
        both = list(mean.parameters()), list(each.parameters())
        train(each, after=lambda both=both: get_ema_multi_avg_fn(0.8)(*both, None))
    assert_same_parameters(*means)
    assert_close(loss(means[0]), loss(means[1]), "loss of the mean")


@pytest.mark.parametrize("fields", [{"dp": 2}, {"dp": 2, "dp_replicate_size": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_a_mean_over_replicas(pool, fields):
    pool.run(averaged_beside, fields, world=2 * fields.get("tp", 1), timeout=120)


def called_with_others(models):
    """Gradients of other parameters than the model's own."""
    found = []
    for model in models:
        given = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
        value = torch.func.functional_call(model, given, (batch(),), {"labels": batch()})
        grads = torch.autograd.grad(value, list(given.values()))
        found.append(torch.cat([value[None].detach(), *(whole(grad).reshape(-1) for grad in grads)]))
    assert_close(*found, "functional_call")


def called_with_one_whole(models):
    """A whole tensor in the place of one parameter, all others the model's own: right, or refused."""
    reference, model = models
    refused = {}
    for name, own in reference.named_parameters():
        found = []
        try:
            for each in models:
                given = (2 * own).detach().requires_grad_()
                value = torch.func.functional_call(each, {name: given}, (batch(),), {"labels": batch()})
                (grad,) = torch.autograd.grad(value, given)
                found.append(torch.cat([value[None].detach(), grad.reshape(-1)]))
            assert_close(*found, f"functional_call with {name}")
        except WrapError as error:
            refused[name] = str(error)
    assert all("functional_call with whole tensors" in said for said in refused.values())
    assert refused.keys() == {name for name, parameter in model.named_parameters() if splits_on_tp(parameter)}


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrized(models):
    for model in models:
        parametrize.register_parametrization(model.model.layers[0].mlp.up, "weight", Half())
    assert_same_parameters(*map(train, models))


def steered(models):
    """Reads hidden states, adds to them, and reads the gradient."""
    seen = []
    for model in models:
        direction = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

        def steer(module, args, output, seen=seen, direction=direction):
            output = output + direction
            output.register_hook(seen.append)
            seen.append(output.detach())
            return output

        handle = model.model.layers[0].register_forward_hook(steer)
        grads = []
        hooks = [p.register_post_accumulate_grad_hook(lambda p, g=grads: g.append(p.grad)) for p in model.parameters()]
        loss(model).backward()
        assert len(grads) == len(hooks)
        handle.remove()
        for hook in hooks:
            hook.remove()
    for one, other in zip(seen[:2], seen[2:], strict=True):
        assert_close(one, other, "hidden states")
    assert_same_gradients(*models)


def scaled(models):
    for model in models:
        model.float()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        # The first gradient is one that all ranks have whole: torch would tell nobody what one rank has found (H44).
        norm = model.model.norm.weight
        optimizer = torch.optim.SGD(sorted(model.parameters(), key=lambda p, norm=norm: p is not norm), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss(model, number)).backward()
            if number == 1 and model is models[0]:
                model.head.bias.grad[0] = float("inf")
            elif number == 1 and dist.get_rank() == 0:  # on one rank
                model.head.bias.grad.to_local()[0] = float("inf")
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024.0 * 2 * 0.5 * 2
    assert_same_parameters(*models, tolerance=1e-5)


def penalised(models):
    """A sum over parameters is a part of one until it is made whole."""
    for model in models:
        (loss(model) + 0.1 * whole(sum(p.pow(2).sum() for p in model.parameters()))).backward()
    assert_same_gradients(*models)


def edited(models):
    """In place, under no_grad; and a mask for gradients."""
    mask = (torch.arange(97) < 10).to(torch.float64)[:, None].expand(97, 32).contiguous()

    def like(tensor, full):
        return distribute_tensor(full, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else full

    for model in models:
        loss(model).backward()
        weight = model.head.weight
        weight.grad.mul_(like(weight.grad, mask))
        with torch.no_grad():
            weight.add_(1.0).clamp_(-1, 1.01)
            weight.data.mul_(0.5)
            weight.copy_(like(weight, torch.where(mask > 0, weight.full_tensor() if model is models[1] else weight, 0)))
            nn.init.zeros_(model.model.layers[0].mlp.down.weight)
    assert_same_parameters(*models)
    assert_same_gradients(*models)


def looked(_=None):
    for thread in threading.enumerate():
        if thread.name == "shardcore-pickled":
            thread.join()


def stated(models):
    """Whole tensors there and back; the state of one part alone."""
    reference, model = models
    train(reference)
    model.load_state_dict(reference.state_dict())
    assert_same_parameters(*models)
    train(reference)
    model.load_state_dict({"head.weight": reference.head.weight.detach()}, strict=False)
    assert_close(reference.head.weight, model.head.weight, "head")
    full = {name: whole(value) for name, value in model.state_dict().items()}
    other = copy.deepcopy(reference)
    other.load_state_dict(full)
    assert_same_parameters(other, model)
    # A file of each rank, and copies in memory, are nobody else's business.
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardcoreWarning)
        torch.save({"model": model.state_dict(), "around": nn.Sequential(model).state_dict()}, own := io.BytesIO())
        copied = copy.deepcopy(model.state_dict()) if dist.get_rank() else {}
        looked()
    state = torch.load(io.BytesIO(own.getvalue()))["model"]
    assert type(state._metadata) is OrderedDict
    for loaded in (state, copied or state):
        model.load_state_dict(loaded)
    assert_same_parameters(other, model)
    # One rank's file on all ranks: the one that writes it says so, and the others that read it.
    file = [None]
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call_checks, "_SOON", 0.1)
            with pytest.warns(ShardcoreWarning, match=r"parts of rank 0 .*ranks: 1") as told:
                looked(torch.save(model.state_dict(), buffer := io.BytesIO()))
        assert told[0].filename == __file__
        file = [buffer.getvalue()]
    dist.broadcast_object_list(file, 0)
    state = torch.load(io.BytesIO(file[0]), weights_only=False)
    if dist.get_rank():
        with pytest.raises(WrapError, match=r"is the part of the rank at \(0,\).*get_model_state_dict"):
            model.load_state_dict(state)


def watched(models):
    """The profiler sees a step; counts of operations are those of one rank."""
    counts = []
    for model in models:
        with (
            FlopCounterMode(display=False) as counter,
            profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
        ):
            loss(model).backward()
        assert any("mm" in event.key for event in profiler.key_averages())
        counts.append(counter.get_total_flops())
    assert 0.3 * counts[0] < counts[1] < 0.8 * counts[0]
    # A module that is entered: its input's gradient is a summand, and the sum comes behind the hook.
    seen = []
    for model in models:
        hook = model.model.layers[0].mlp.register_full_backward_hook(
            lambda m, into, out: seen.append((into[0], out[0]))
        )
        loss(model).backward()
        hook.remove()
    summand = seen[1][0].clone()
    dist.all_reduce(summand)
    assert_close(seen[0][0], summand, "the sum of the gradients of inputs")
    assert_close(seen[0][1], seen[1][1], "the gradient of the output")


def refused(models):
    model = models[1]
    given = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(NotSupportedError, match=r"transform of torch.func .*torch\.autograd\.grad"):
        torch.func.grad(lambda given: torch.func.functional_call(model, given, (batch(),)).sum())(given)
    old = warnings.catch_warnings(action="ignore")  # of one kind or another, in releases
    with old, pytest.raises(NotSupportedError, match=r"jit\.trace .*records no collectives"):
        torch.jit.trace(model, (batch(),), check_trace=False)
    with pytest.raises(WrapError, match="functional_call with whole tensors"):
        torch.func.functional_call(model, dict(models[0].named_parameters()), (batch(),))
    with pytest.raises(NotSupportedError, match="second derivatives"):
        torch.autograd.grad(loss(model), list(model.parameters()), create_graph=True)
    assert_close(loss(models[0]), loss(model), "loss after that")


def normed(models):
    """A weight_norm of a sharded linear divides by norms of parts: it is refused in the next call, or by the plan."""
    for name in ("up", "down"):  # of rows, and of columns
        reference, model = twins(fields=TP2)
        weight_norm(getattr(model.model.layers[0].mlp, name))
        with pytest.raises(WrapError, match=rf"layers\.0\.mlp\.{name}\.weight .*has a weight_norm now"):
            loss(model)
        weight_norm(getattr(reference.model.layers[0].mlp, name))
        with pytest.raises(PlanError, match=rf"mlp\.{name}: .*Parametrized"):
            shard(reference, **TP2)


WAYS = [
    averaged,
    called_with_others,
    called_with_one_whole,
    parametrized,
    normed,
    steered,
    scaled,
    penalised,
    edited,
    stated,
    watched,
    refused,
]


def every_way():
    for way in WAYS:
        try:
            way(twins(fields=TP2))
        except Exception as error:
            error.add_note(f"in {way.__name__}")
            raise


def test_what_people_do_in_plain_torch(pool):
    pool.run(every_way, world=2, timeout=180)


def compiled(backend):
    """Forward, loss, backward and the optimizer's step in one compiled function."""
    reference, model = twins(fields=TP2, heads=4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (reference, model)]

    def made(model, optimizer):
        def step(number):
            optimizer.zero_grad()
            value = loss(model, number)
            value.backward()
            optimizer.step()
            return value.detach()

        # Sizes that a compiler takes for unknown ones have no place in the layout of a DTensor: torch 2.13 and 2.14.
        return torch.compile(step, backend=backend, dynamic=False)

    warnings.simplefilter("ignore")  # of torch, of its own code
    steps = [made(*each) for each in zip((reference, model), optimizers, strict=True)]
    for number in range(3):
        found = [step(number) for step in steps]
        assert_close(*found, "loss")
        assert_same_gradients(reference, model)
    assert_same_parameters(reference, model)


@pytest.mark.nightly
@TRACES
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_step(pool, backend):
    pool.run(compiled, backend, world=2, timeout=180)


def test_shardcore_is_not_asked_by_plain_models():
    model = nn.Linear(3, 2)
    assert shardcore.grad_norm(model).item() == 0
    assert torch.func.grad(lambda w: torch.func.functional_call(model, {"weight": w}, (torch.ones(3),)).sum())(
        model.weight.detach()
    ).shape == (2, 3)
