"""A model of models: a tower that sees and a decoder that speaks, each with heads, a configuration and a policy."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from tiny import Attention, Config, Mlp, TinyLM, TinyPolicy, randomize
from torch import Tensor, nn

from shardcore.policy import Heads, ModulePolicy, Policy, Stages
from shardcore.styles import delegate, head, norm, region, replicate, sequence

WIDTH, WORDS, PATCHES = 16, 97, 5


class Layer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        config = Config(hidden=WIDTH, heads=heads, kv_heads=heads, inner=20, qk_norm=False)
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(config), Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Tower(nn.Module):
    """Patches (B, P, 3) to states (B, P, WIDTH)."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.config = type("TowerConfig", (), {"count": heads})()
        self.patches = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Layer(heads) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Pair(nn.Module):
    """The decoder speaks about what the tower sees; a head tied to its embedding names the first word at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sight, self.speech = Tower(), TinyLM(Config(layers=2))
        self.bridge = nn.Linear(WIDTH, 32)
        self.first = nn.Linear(32, WORDS, bias=False)
        self.first.weight = self.speech.model.embed.weight

    def forward(self, patches: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        seen = self.bridge(self.sight(patches))
        first = self.first(seen.mean(1))
        inputs = torch.cat([seen, self.speech.model.embed(ids)], 1)
        if labels is None:
            return torch.cat([first[:, None], self.speech(inputs=inputs)], 1)
        spoken = F.pad(labels, (seen.size(1), 0), value=-100)
        return self.speech(inputs=inputs, labels=spoken) + F.cross_entropy(first, labels[:, 0])


class Album(nn.Module):
    """A model around the pair."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.scale = Pair(), nn.Linear(1, 1)

    def forward(self, patches: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.pair(self.scale(patches.unsqueeze(-1)).squeeze(-1), ids, labels)


class TowerPolicy(Policy):
    checks = (Heads("count"),)
    stages = Stages(first="patches", blocks="layers", last="norm")
    log: ClassVar[list[str]] = []

    def preprocess(self) -> None:
        self.log.append(f"before {type(self.model).__name__}")

    def postprocess(self) -> None:
        self.log.append(f"after {type(self.model).__name__}")

    def new_model_class(self) -> type[nn.Module]:
        return type("Tower", (type(self.model),), {"by": "its own policy"})

    def module_policy(self) -> ModulePolicy:
        columns = tuple(f"attention.{name}_proj" for name in "qkv")
        return {
            "Tower": [replicate("patches"), norm("norm"), sequence(scatter="layers[0]", gather="norm")],
            "Layer": [
                norm("norm"),
                region(enter="attention", col=columns, row="attention.o_proj", unit="head"),
                region(enter="mlp", col=("mlp.gate", "mlp.up"), row="mlp.down"),
            ],
        }


class SpeechPolicy(TinyPolicy):
    extra_kwargs = frozenset({"slowly"})

    def module_policy(self) -> ModulePolicy:
        rules = super().module_policy()
        return {**rules, "Decoder": [*rules["Decoder"], sequence(scatter="layers[0]", gather="norm")]}


class PairPolicy(Policy):
    """With the policies of its parts."""

    stages = Stages(blocks=("sight", "speech"), between="bridge", last="first")
    given: ClassVar[dict[str, Any]] = {"sight": TowerPolicy, "speech": SpeechPolicy}

    def module_policy(self) -> ModulePolicy:
        parts = [delegate(name, policy=self.given.get(name)) for name in ("sight", "speech")]
        return {"Pair": [*parts, replicate("bridge"), head("first")]}


class LookingPolicy(PairPolicy):
    """With policies of installed packs."""

    given: ClassVar[dict[str, Any]] = {}


class AlbumPolicy(Policy):
    stages = Stages(first="scale", blocks="pair")

    def module_policy(self) -> ModulePolicy:
        return {"Album": [delegate("pair", policy=PairPolicy), replicate("scale")]}


def build(kind: type[nn.Module] = Pair) -> Any:
    model = kind().double()
    randomize(model)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return patches (B, P, 3) and ids (B, S)."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(2, PATCHES, 3, generator=generator, dtype=torch.float64)
    return patches, torch.randint(0, WORDS, (2, 6), generator=generator)
