"""Models of one's own that contain transformers of torch: by a policy for all of them, by `delegate`, by its words."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcore
from shard_torch.policy import OwnModelPolicy
from shardcore.errors import PlanError
from shardcore.policy import ModulePolicy, Policy, Stages
from shardcore.styles import attention, delegate, norm, region, replicate, sequence, vocab
from shardcore_testing import randomized
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters
from shardcore_testing.subject import adamw

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning")
B, L, S, E, H, WORDS = 3, 5, 7, 24, 4, 31


class Tagger(nn.Module):
    """Words to tags: an embedding, an encoder, a linear."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, E)
        self.places = nn.Parameter(torch.zeros(S, E))
        layer = nn.TransformerEncoderLayer(E, H, 37, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E))
        self.head = nn.Linear(E, 9)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(ids) + self.places, src_key_padding_mask=padding))


class TaggerPolicy(Policy):
    """All of it, the encoder by the policy for its class."""

    stages = Stages(first=("embed", "places"), blocks="encoder", last="head")

    def module_policy(self) -> ModulePolicy:
        return {"Tagger": [vocab("embed"), delegate("encoder"), replicate("places", "head")]}


class Block(nn.Module):
    """Attention to itself and an MLP, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.attn = nn.MultiheadAttention(E, H, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(E, 37), nn.GELU(), nn.Linear(37, E))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    """Patches to a label; a learned query attends to all of them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, E)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(E)
        self.probe = nn.Parameter(torch.zeros(1, 1, E))
        self.pool = nn.MultiheadAttention(E, H, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(E, H, 37, 0.0, batch_first=True)
        self.head = nn.Linear(E, 3)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch(patches)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        probe = self.probe.expand(x.size(0), -1, -1)
        return self.head(self.decoder(self.pool(probe, x, x)[0], x))


class VisionPolicy(Policy):
    """All of it, in this pack's words."""

    stages = Stages(first="patch", blocks="blocks", last=("norm", "probe", "pool", "decoder", "head"))

    def module_policy(self) -> ModulePolicy:
        return {
            "Block": [
                norm("norm1", "norm2"),
                attention("attn", of="self"),
                region(enter="mlp", col="mlp.0", row="mlp.2"),
            ],
            "Vision": [
                replicate("patch", "probe", "head"),
                norm("norm"),
                attention("pool", of="memory"),
                delegate("decoder"),
                sequence(scatter="blocks[0]", gather="norm"),
            ],
        }


class OwnTransformer(nn.Transformer):
    """A subclass that adds no parameter."""


def _chain() -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, H, 37, 0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(WORDS, E), nn.TransformerEncoder(layer, 2), nn.Sequential(nn.Linear(E, 3)))


class Language(nn.Transformer):
    """The language model of torch's tutorials, which has a linear in the place of the decoder."""

    def __init__(self) -> None:
        super().__init__(E, H, num_encoder_layers=2, dim_feedforward=37, dropout=0.0)
        self.embed = nn.Embedding(WORDS, E)
        self.decoder = nn.Linear(E, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), dtype=torch.float64)
        return self.decoder(self.encoder(self.embed(ids.t()), mask=mask)).log_softmax(-1)


class Recurrent(nn.Module):
    """A layer after a recurrent network, which keeps its parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(12, E, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(E, H, 37, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.gru(x)[0])


def _ids(seed: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, WORDS, (B, S), generator=torch.Generator().manual_seed(seed)),)


def _padded(seed: int) -> tuple[Tensor, ...]:
    return (*_ids(seed), torch.arange(S) >= torch.tensor([7, 4, 6])[:, None])


def _patches(seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(B, S, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),)


def _pair(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, B, E, generator=generator, dtype=torch.float64) for size in (S, L))


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Policy] | None, Callable[[int], tuple[Tensor, ...]], bool]] = {
    "tagger": (Tagger, OwnModelPolicy, _padded, True),
    "tagger, delegated": (Tagger, TaggerPolicy, _padded, True),
    "vision": (Vision, OwnModelPolicy, _patches, False),
    "vision, in words": (Vision, VisionPolicy, _patches, True),
    "language": (Language, OwnModelPolicy, _ids, True),
    "recurrent": (Recurrent, OwnModelPolicy, _patches, False),
    "chain": (_chain, OwnModelPolicy, _ids, True),
    "subclass": (lambda: OwnTransformer(E, H, 2, 2, 37, 0.0), None, _pair, True),
}


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_training(pool, name, world):
    pool.run(_trained, name, world=world)


def _trained(name: str) -> None:
    build, policy, inputs, tokens = MODELS[name]
    for split in (False, True) if tokens else (False,):
        reference = randomized(build())
        given = {} if policy is None else {"policy": policy}
        tp = dist.get_world_size()
        model = shardcore.shard(copy.deepcopy(reference), tp=tp, enable_sequence_parallelism=split, **given)
        both = (reference, model)
        optimizers = [adamw(m) for m in both]
        for step in range(2):
            for micro in range(2):
                outs = [m(*inputs(10 * step + micro)) for m in both]
                assert_close(*outs, "output")
                for out in outs:
                    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).mean().backward()
            assert_same_gradients(reference, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(reference, model)
        assert any(p.placements[0].is_shard() for p in model.parameters())
        assert list(model.state_dict()) == list(reference.state_dict())


def test_sums_at_the_end_of_a_step(pool):
    pool.run(_deferred, world=2)


def _deferred() -> None:
    reference = randomized(Vision())
    model = shardcore.shard(copy.deepcopy(reference), tp=2, policy=VisionPolicy, partial_gradients="deferred")
    for seed in (0, 1):
        for m in (reference, model):
            m(*_patches(seed)).square().mean().backward()
    shardcore.reduce_partial_gradients(model)
    assert_same_gradients(reference, model)


def test_inference(pool):
    pool.run(_inference, world=2)


def _inference() -> None:
    for build, policy, inputs in ((Tagger, TaggerPolicy, _padded), (Vision, OwnModelPolicy, _patches)):
        reference = randomized(build()).eval()
        model = shardcore.shard(copy.deepcopy(reference), tp=2, policy=policy, inference_only=True)
        with torch.no_grad():
            assert_close(reference(*inputs(0)), model(*inputs(0)), "output")


def test_replicas(pool):
    pool.run(_replicas, world=4)


def _replicas() -> None:
    reference = randomized(Tagger())
    model = shardcore.shard(copy.deepcopy(reference), tp=2, dp=2, policy=TaggerPolicy)
    out, wanted = model(*_padded(0)), reference(*_padded(0))  # both replicas have the same batch
    assert_close(wanted, out, "output")
    for result in (wanted, out):
        result.square().mean().backward()
    assert_same_gradients(reference, model)


def test_one_seed_gives_one_run(pool):
    pool.run(_drawn, world=2)


def _drawn() -> None:
    torch.manual_seed(dist.get_rank())
    model = shardcore.shard(randomized(Tagger(dropout=0.2)), tp=2, policy=OwnModelPolicy)
    outs = []
    for _ in range(2):
        shardcore.manual_seed(model, 3)
        outs.append(model(*_padded(0)))
    assert torch.equal(*outs)


class _Unsaid(VisionPolicy):
    def module_policy(self) -> ModulePolicy:
        rules = super().module_policy()
        return {**rules, "Block": [attention("attn"), *(r for r in rules["Block"] if "attention" not in str(r))]}


def test_where_tokens_are_split_it_has_to_be_said_what_is_attended_to():
    config = shardcore.ShardConfig(tensor_parallel_size=2, enable_sequence_parallelism=True)
    registry = shardcore.Registry.discover()
    with pytest.raises(PlanError, match="whether keys and values are split along the sequence is not known"):
        shardcore.compile_plan(_Unsaid(), Vision(), config, delegates=registry.policy_for)
