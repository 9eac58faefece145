"""Shardformer's layers by themselves: default group, losses of split logits, dropouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardcore
import shardcore_shardformer as compat
from shardcore import Policy, ShardConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_shardformer import ModulePolicyDescription, SubModuleReplacementDescription
from shardcore_testing.parity import assert_close

NOTHING = {
    "seq_parallel_mode": None, "seq_parallel_dim": 1, "overlap": False, "fp8_communication": False,
    "skip_bias_add": False, "stream_chunk_num": 1, "make_vocab_size_divisible_by": None, "split_sizes": None,
    "use_zbv": True, "gather_output": False,
}  # fmt: skip


def _linear():
    torch.manual_seed(0)
    return nn.Linear(8, 12).double()


def default_group():
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = _linear()(x)
    rank, half = dist.get_rank(), 6
    for arguments in ((), (None,), ([None],), (dist.group.WORLD,)):
        layer = compat.Linear1D_Col.from_native_module(_linear(), *arguments)
        assert_close(wanted[:, rank * half : (rank + 1) * half], layer(x), "output")
        assert tuple(layer.weight.shape) == (12, 8)  # of the whole, as docs/compat.md says
        assert tuple(layer.weight.to_local().shape) == (6, 8)
    row = compat.Linear1D_Row.from_native_module(_linear(), process_group=None, parallel_input=False)
    assert_close(wanted, row(x), "output")
    torch.manual_seed(0)
    table = nn.Embedding(9, 4).double()
    ids = torch.arange(9)
    rows = table(ids).detach()
    assert_close(rows, compat.VocabParallelEmbedding1D.from_native_module(table, process_group=None)(ids), "rows")


def test_layers_take_the_default_group(pool):
    pool.run(default_group, world=2)


def test_without_any_process_group():
    with pytest.raises(ConfigError, match=r"no process group was given, and there is no default one; call shardcore\."):
        compat.Linear1D_Col.from_native_module(_linear())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.split_drop, self.down = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)
        self.whole_drop, self.own_drop = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.own_drop(self.whole_drop(self.down(self.split_drop(self.up(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Ported(Policy):
    options = NOTHING

    def module_policy(self):
        replace = [
            SubModuleReplacementDescription("up", compat.Linear1D_Col, self.options),
            SubModuleReplacementDescription("down", compat.Linear1D_Row, self.options),
            SubModuleReplacementDescription("split_drop", compat.DropoutForParallelInput),
            SubModuleReplacementDescription("whole_drop", compat.DropoutForReplicatedInput),
            SubModuleReplacementDescription("own_drop", compat.DropoutForParallelInput),
        ]
        return {"Block": ModulePolicyDescription(sub_module_replacement=replace)}


def _sharded(policy=Ported):
    torch.manual_seed(0)
    model = shardcore.ModelSharder(Net().double(), policy, ShardConfig(tensor_parallel_size=2)).shard()
    torch.manual_seed(100 + dist.get_rank())  # users seed as they like
    return model


def dropouts():
    model, x = _sharded(), torch.ones(4, 8, dtype=torch.float64)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _m, _a, out, name=name: seen.setdefault(name, []).append(out == 0))
    state = shardcore.get_rng_state(model)
    outputs = []
    for _ in range(2):
        shardcore.set_rng_state(model, state)
        outputs.append(model(x).detach())
    assert torch.equal(*outputs)  # replayed
    ranks = [None, None]
    dist.all_gather_object(ranks, seen)
    for name in seen:
        first, second = (rank[name][0] for rank in ranks)
        assert 0.2 < first.double().mean() < 0.8
        assert torch.equal(first, second) is name.endswith("whole_drop"), name
    flat = [found[0] for found in seen.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i] if a.shape == b.shape)
    model.eval()
    reference = Net().double().eval()
    reference.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    before = torch.get_rng_state()
    assert_close(reference(x), model(x), "output")
    assert torch.equal(before, torch.get_rng_state())


def test_dropouts_of_ported_policies(pool):
    pool.run(dropouts, world=2)


@pytest.mark.parametrize("cls", [compat.DropoutForParallelInput, compat.DropoutForReplicatedInput])
def test_a_dropout_that_stands_alone_is_refused(cls):
    with pytest.raises(NotSupportedError, match=r"only a policy can make one: SubModuleReplacementDescription\("):
        cls.from_native_module(nn.Dropout(0.1), process_group=None)


def _logits(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(3, 5, size, generator=generator, dtype=dtype)
    labels = torch.randint(0, size, (3, 5), generator=generator)
    labels[0, 1:3] = -100
    return logits, labels


def _own(logits, cuts):
    rank = dist.get_rank()
    return logits[..., cuts[rank] : cuts[rank + 1]].clone().requires_grad_()


def losses():
    rank = dist.get_rank()
    for size, cuts in ((12, (0, 6, 12)), (11, (0, 6, 11)), (11, (0, 2, 11))):
        whole, labels = _logits(size)
        for mode in ("mean", "sum", "none"):
            reference = whole.clone().requires_grad_()
            wanted = F.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction=mode)
            own = _own(whole, cuts)
            got = compat.cross_entropy_1d(own, labels, vocab_size=size if mode == "sum" else None, mode=mode)
            assert_close(wanted.view(got.shape), got, mode)
            (wanted.flatten() * torch.arange(1.0, wanted.numel() + 1)).sum().backward()
            (got.flatten() * torch.arange(1.0, got.numel() + 1)).sum().backward()
            assert_close(reference.grad[..., cuts[rank] : cuts[rank + 1]], own.grad, f"gradient of {mode}")
        reference, own = whole.clone().requires_grad_(), _own(whole, cuts)
        chosen = reference.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
        wanted = chosen.masked_fill(labels.unsqueeze(-1) == -100, 0)
        got = compat.dist_log_prob_1d(own, labels, dist.group.WORLD, size, torch.float64)
        assert got.shape == (3, 5, 1)
        assert_close(wanted, got, "log probability")
        (wanted * wanted).sum().backward()
        (got * got).sum().backward()
        assert_close(reference.grad[..., cuts[rank] : cuts[rank + 1]], own.grad, "gradient of the log probability")
    whole, labels = _logits(12)
    mesh = init_device_mesh("cpu", (2,))
    split = DTensor.from_local(_own(whole, (0, 6, 12)), mesh, [Shard(2)])
    labels = labels.masked_fill(labels == -100, 1)
    wanted = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=7)
    assert_close(wanted, compat.cross_entropy_1d(split, labels, 7), "of a DTensor, with another ignore_index")
    with pytest.raises(ConfigError, match=r"vocab_size is 16, but the ranks hold \[6, 6\], which are 12 words"):
        compat.cross_entropy_1d(_own(whole, (0, 6, 12)), labels, vocab_size=16)
    with pytest.raises(ConfigError, match=r"wanted Shard\(2\) alone"):
        compat.cross_entropy_1d(DTensor.from_local(whole[:2], mesh, [Shard(0)]), labels)
    with pytest.raises(IndexError, match="labels from 0 to 12, but the vocabulary has 12 words"):
        compat.dist_log_prob_1d(_own(whole, (0, 6, 12)), labels.clone().fill_(0).index_fill_(0, torch.tensor([1]), 12))


def test_losses_of_split_logits(pool):
    pool.run(losses, world=2)


def test_the_import_line_of_the_quick_start():
    space = {}
    exec("from shardcore_shardformer import ShardConfig, Shard", space)
    assert space["Shard"] is compat.ShardFormer
