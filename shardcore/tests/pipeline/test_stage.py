"""Stages run one after the other in one process, and together are the model; what they cannot have is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tiny import TinyPolicy, batch, build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcore.errors import NotSupportedError
from shardcore.pipeline import Cut, PrunedModel, Stage, StageTracer
from shardcore.pipeline.losses import own_loss
from shardcore.pipeline.steps import groups_of
from shardcore.plan import Stages


def arguments(seed: int = 0, rows: int = 3, length: int = 8) -> dict[str, Any]:
    return {"ids": batch(seed, rows, length), "labels": batch(seed + 1, rows, length)}


def stages_of(model: nn.Module, cut: Cut) -> list[Stage]:
    return [Stage(PrunedModel(copy.deepcopy(model), cut, [index]), index) for index in range(len(cut))]


def forward(stages: list[Stage], call: dict[str, Any], metadata: Any) -> list[tuple[list[Tensor], Any]]:
    arrived: list[Tensor] = []
    flight = []
    for stage in stages:
        out = stage(call, arrived, metadata)
        flight.append((arrived, out))
        arrived = [] if stage.is_last else [t.detach().requires_grad_(t.is_floating_point()) for t in out]
    return flight


def backward(flight: list[tuple[list[Tensor], Any]]) -> None:
    flight[-1][1].backward()
    for (arrived, _), (_, left) in zip(reversed(flight), reversed(flight[:-1]), strict=False):
        torch.autograd.backward(left, [tensor.grad for tensor in arrived])


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"checkpoint": "non-reentrant"}], ids=str)
@pytest.mark.parametrize("number", [2, 4])
def test_together_they_are_the_model(number, options):
    model = build(layers=4, **options)
    cut = Cut.of(model, TinyPolicy.stages, number)
    stages, tracer = stages_of(model, cut), StageTracer(model, cut)
    # Calls of several shapes are in flight at once.
    calls = [arguments(0), arguments(1, 1, 5), arguments(2, 4, 12)]
    flights = [forward(stages, call, tracer(call)) for call in calls]
    for call, flight in zip(calls, flights, strict=True):
        wanted = model(**call)
        assert torch.equal(wanted, flight[-1][1])
        wanted.backward()
    for flight in flights:
        backward(flight)
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters(remove_duplicate=False):
            own = "model.embed.weight" if options.get("tied") and name == "head.weight" else name
            found[own] = found.get(own, 0) + parameter.grad
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_micro_batches_of_one_name_have_one_form():
    model = build(layers=2)
    tracer = StageTracer(model, Cut.of(model, TinyPolicy.stages, 2))
    parts = [arguments(0), arguments(1), arguments(2, 2), arguments(3, 3, 5), arguments(4)]
    forms = tracer.forms(parts, own_loss)
    shapes = [part["ids"].shape for part in parts]
    names = [name for name, _ in forms]
    assert [names.index(name) for name in names] == [shapes.index(shape) for shape in shapes] == [0, 0, 2, 3, 0]
    assert [metadata.boundaries[0].values[0].shape[:2] for _, metadata in forms] == shapes
    groups = groups_of(forms)
    assert [group.numbers(group.count) for group in groups] == [[0, 1], [2], [3], [4]]
    assert [group.metadata for group in groups] == [forms[0][1], forms[2][1], forms[3][1], forms[0][1]]


def test_a_stage_has_no_parameters_but_its_own():
    model = build(layers=4)
    cut = Cut.of(model, TinyPolicy.stages, 3, bounds=(0, 1, 3, 4))
    stages = stages_of(model, cut)
    held = [set(stage.model.state_dict()) for stage in stages]
    assert set().union(*held) == set(model.state_dict())
    assert sum(map(len, held)) == len(model.state_dict())
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in held[1])
    assert [type(stage.model.model.layers[0]).__name__ for stage in stages] == ["Block"] * 3
    # What others hold can be asked for its shape and dtype, and takes no memory.
    weight = stages[1].model.model.layers[0].mlp.up.weight
    assert weight.shape == model.model.layers[0].mlp.up.weight.shape
    assert weight.untyped_storage().nbytes() == weight.element_size()
    assert bool(weight.isnan().all())


def test_a_stage_by_itself_says_so():
    model = build(layers=2)
    PrunedModel(model, Cut.of(model, TinyPolicy.stages, 2), [0])
    with pytest.raises(NotSupportedError, match=r"model.layers.1 is held by another rank of the pipeline"):
        model(**arguments())


def test_an_exception_leaves_a_stage_as_it_was():
    model = build(layers=2)
    cut = Cut.of(model, TinyPolicy.stages, 2)
    stages, metadata = stages_of(model, cut), StageTracer(model, cut)(arguments())
    with pytest.raises((IndexError, RuntimeError)):
        stages[0]({**arguments(), "ids": torch.full((3, 8), 999)}, [], metadata)
    assert torch.equal(forward(stages, arguments(), metadata)[-1][1], model(**arguments()))


def test_another_model_of_the_class_is_untouched():
    model, other = build(layers=2), build(layers=2)
    PrunedModel(model, Cut.of(model, TinyPolicy.stages, 2), [0])
    assert torch.equal(other(**arguments()), build(layers=2)(**arguments()))
    assert type(other.model.layers[0]) is not type(model.model.layers[0])


class Net(nn.Module):
    """Blocks with something that passes by them; every class below is a way to do that."""

    stages = Stages(first="embed", blocks="blocks", last="head")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Skips(Net):
    """The loss takes what the first block returned."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        kept = first = self.blocks[0](x)
        for block in self.blocks[1:]:
            first = block(first)
        return (self.head(first) + kept).square().sum()


class Aside(Net):
    """The head is called with what comes of the embedding, besides the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        aside = self.embed(x)
        x = aside
        for block in self.blocks:
            x = block(x)
        return self.head(x + aside.detach()).square().sum()


class Backwards(Net):
    """The blocks run in another order than they are named in."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x).square().sum()


class Again(Net):
    """The blocks run twice, as an encoder of two modalities does."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
        return self.head(x).square().sum()


class Handed(Net):
    """What is made of parameters and goes to every block goes from stage to stage; what comes of the input does not."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, table: Tensor, scale: Tensor) -> tuple[Tensor, None]:
            return self.inner(x) * scale + table, None

    stages = Stages(first=("embed", "table"), blocks="blocks", last="head")

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4))
        self.blocks = nn.ModuleList(self.Adds() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        table, scale = self.table.tanh(), x.mean()
        x = self.embed(x)
        for block in self.blocks:
            x, _ = checkpoint(block, x, table=table, scale=scale, use_reentrant=False)
        return self.head(F.dropout(x, 0.0)).square().sum()


class Masked(Net):
    """What is in front of the blocks returns a mask too, for which no NaN can stand."""

    class Embeds(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), (x[:, :1] > 0).to(torch.uint8)

    class Hides(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x).masked_fill(mask == 1, 0.0)

    given: ClassVar[Callable[[Tensor], Tensor]] = torch.logical_not

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.Embeds(4, 4)
        self.blocks = nn.ModuleList(self.Hides(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, mask = self.embed(x)
        for block in self.blocks:
            x = block(x, self.given(mask))
        return self.head(x).square().sum(), mask


class Compares(Masked):
    """The model itself makes the mask, of what is in front of the blocks: NaN is below nothing."""

    stages = Stages(first="embed", blocks="blocks", last="head")

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.embed(x)
        mask = x[:, :1] < 0
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).square().sum()


class OneStageMakesIt(Masked):
    stages = Stages(first="embed", blocks="blocks", last="head")


class EachStageMakesIt(Masked):
    stages = Stages(blocks="blocks", last="head", everywhere="embed")


class BlocksAreGivenIt(OneStageMakesIt):
    @staticmethod
    def given(mask: Tensor) -> Tensor:
        return mask


class IsDrawn(OneStageMakesIt):
    """By the model, for each call anew; none of these hides anything."""

    @staticmethod
    def given(mask: Tensor) -> Tensor:
        return torch.randint(2, 1000, (1,))


class NoBlockReadsIt(OneStageMakesIt):
    @staticmethod
    def given(mask: Tensor) -> Tensor:
        return torch.zeros_like(mask)


@pytest.mark.parametrize("kind", [EachStageMakesIt, BlocksAreGivenIt, IsDrawn, NoBlockReadsIt])
def test_masks_that_blocks_are_given_are_made_in_each_stage_or_go_along(kind):
    torch.manual_seed(0)
    model = kind().double()
    cut, call = Cut.of(model, kind.stages, 3), {"x": torch.randn(5, 4, dtype=torch.float64)}
    metadata = StageTracer(model, cut)(call, lambda out, _: out[0])
    assert metadata.missing == (() if kind is EachStageMakesIt else (1,))  # of the output
    crosses = [[value.dtype for value in boundary.values] for boundary in metadata.boundaries]
    assert crosses == [[torch.float64, *([torch.uint8] if kind is BlocksAreGivenIt else [])]] * 2
    flight = forward(stages_of(model, cut), call, metadata)
    (wanted, mask), (got, found) = model(**call), flight[-1][1]
    assert torch.equal(wanted, got)
    assert torch.equal(mask, found) == (kind is EachStageMakesIt)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OneStageMakesIt, r"calls blocks.1 with a mask, or numbers, made of what only another .* Stages\(everywhere"),
        (Compares, r"calls blocks.1 with a mask, or numbers, made of what only another stage can compute"),
        (Skips, "the loss of Skips depends on what an earlier stage has computed"),
        (Aside, r"stage 1 calls head with a tensor \(5, 4\) that only another stage can compute"),
        (Backwards, r"that only another stage can compute"),
        (Again, r"Again calls blocks.0 again after blocks.2, and a stage of a pipeline runs its blocks before"),
    ],
    ids=["masks", "compares", "skips", "aside", "backwards", "again"],
)
def test_what_would_be_wrong_is_refused(kind, said):
    model = kind()
    tracer = StageTracer(model, Cut.of(model, kind.stages, 2))
    with pytest.raises(NotSupportedError, match=said):
        tracer({"x": torch.randn(5, 4)}, lambda out, _: out[0] if isinstance(out, tuple) else out)


def test_all_that_blocks_are_given_crosses():
    torch.manual_seed(0)
    model = Handed().double()
    cut = Cut.of(model, Handed.stages, 3)
    calls = [{"x": torch.randn(5, 4, dtype=torch.float64)} for _ in range(2)]
    tracer = StageTracer(model, cut)
    traced = [tracer(call) for call in calls]
    assert [[value.shape for value in boundary.values] for boundary in traced[0].boundaries] == [[(5, 4), (4,)]] * 2
    stages = stages_of(model, cut)
    flights = [forward(stages, call, metadata) for call, metadata in zip(calls, traced, strict=True)]
    for call, flight in zip(calls, flights, strict=True):
        wanted = model(**call)
        wanted.backward()
        assert torch.equal(wanted, flight[-1][1])
        backward(flight)
    torch.testing.assert_close(stages[0].model.table.grad, model.table.grad, rtol=1e-12, atol=1e-12)


class Spans(nn.Linear):
    """Chooses rows by numbers that it makes of lengths alone: libraries slice by them, or keep them in a cache."""

    @staticmethod
    @functools.lru_cache
    def index(length: int) -> Tensor:
        return torch.arange(length).flip(0)

    def forward(self, x: Tensor) -> Tensor:
        span = torch.tensor(min(x.size(-1), 3))
        weight = self.weight[self.index(x.size(-1))][: span + 1]
        return F.linear(x, weight, self.bias)


class Spanning(Net):
    """Its blocks compute with lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Spans(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


def test_what_is_made_of_lengths_is_computed():
    model = Spanning()
    cut = Cut.of(model, Net.stages, 3)
    call = {"x": torch.randn(2, 4)}
    stages, metadata = stages_of(model, cut), StageTracer(model, cut)(call)
    assert Spans.index(4).device.type == "cpu"
    assert torch.equal(forward(stages, call, metadata)[-1][1], model(**call))


class Experts(nn.Module):
    """Multiplies each half of the rows with a matrix of its own, as experts of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight, offs=torch.tensor([len(x) // 2, len(x)], dtype=torch.int32))


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


def test_experts_in_a_dtype_for_which_torch_tells_no_shapes():
    model = Mixture()
    cut = Cut.of(model, Net.stages, 3)
    call = {"x": torch.randn(6, 4)}
    stages, metadata = stages_of(model, cut), StageTracer(model, cut)(call)
    assert torch.equal(forward(stages, call, metadata)[-1][1], model(**call))


def test_a_part_that_cannot_be_traced():
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    model = Handed()
    model.embed = Reads(4, 4)
    tracer = StageTracer(model, Cut.of(model, Handed.stages, 2))
    with pytest.raises(NotSupportedError, match=r"embed cannot be called on meta.*pipeline_parallel_size=1"):
        tracer({"x": torch.randn(5, 4)})
