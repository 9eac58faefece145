"""Losses of micro-batches, put together: what they are means over is seen. The reference is the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardcore.errors import ConfigError
from shardcore.pipeline import micro_batches
from shardcore.pipeline.losses import LossCalls, _near, named, reductions_of, shares_of

WORDS = 7
LINEAR = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it since 2.13")
LABELS = torch.tensor([[5, 1, -100, 2], [3, -100, -100, -100], [-100, 2, 4, 6], [1, 1, 1, -100]])

REPLACED = LABELS.gt(1).long()


def logits(rows, *shape):
    """Numbers that follow from what a row holds, so that a micro-batch has those of the batch."""
    return torch.sin(
        rows.reshape(-1, *[1] * len(shape)) * 7.0 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    )


def causal(x, labels, **more):
    """As transformers computes it: every token predicts the next one."""
    scores = logits(x, 4, WORDS)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if "num_items_in_batch" not in more else "sum"
    loss = F.cross_entropy(scores.flatten(0, 1), shifted.flatten(), reduction=reduction)
    return loss if reduction == "mean" else loss / more["num_items_in_batch"]


def cut(x, labels):
    return F.cross_entropy(logits(x, 4, WORDS)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_the_head_too(x, labels):
    head = logits(torch.zeros(1), WORDS, 5)[0].double()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.linear_cross_entropy(logits(x, 4, 5).flatten(0, 1), head, shifted.flatten())


def masked(x, labels):
    return F.cross_entropy(logits(x, 4, WORDS).flatten(0, 1), labels.flatten()) * 0.5


def by_hand(x, labels):
    total = F.cross_entropy(logits(x, 4, WORDS).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / labels.ne(-100).sum()


def one_by_one(x, labels):
    each = F.cross_entropy(logits(x, 4, WORDS).flatten(0, 1), labels.flatten(), reduction="none")
    return each.sum() / labels.ne(-100).sum()


def summed(x, labels):
    return F.cross_entropy(logits(x, 4, WORDS).flatten(0, 1), labels.flatten(), reduction="sum")


def of_rows(x, labels):
    return F.mse_loss(logits(x, 3), x[:, None].expand(-1, 3))


def both_ends(x, start_positions, end_positions):
    ends = F.cross_entropy(logits(x, 4), start_positions), F.cross_entropy(logits(x + 1, 4), end_positions)
    return sum(ends) / 2


def listened(reduction):
    def ctc(x, labels):
        scores = logits(x, 9, WORDS).log_softmax(-1).transpose(0, 1)
        sizes = labels.gt(0).sum(-1)
        lengths = torch.full_like(sizes, 9)
        return F.ctc_loss(scores, labels[labels.gt(0)], lengths, sizes, reduction=reduction)

    return ctc


def two_means(x, labels):
    return masked(x, labels) + F.cross_entropy(logits(x, 2), x.long() % 2)


def some_of_them(x, labels):
    mask = labels.gt(1).double()
    return (F.l1_loss(logits(x, 4), x[:, None].expand(-1, 4), reduction="none") * mask).sum() / mask.sum()


def of_patches(x, mask):
    return (F.l1_loss(logits(x, 4), x[:, None].expand(-1, 4), reduction="none") * mask).sum() / mask.sum()


def of_tokens_that_are_there(x, labels, mask):
    """As ELECTRA's discriminator has it."""
    there = mask == 1
    return F.binary_cross_entropy_with_logits(logits(x, 4)[there], labels[there].double())


def of_no_function(x, labels):
    return logits(x, 3).square().mean()


def together(loss, batch, *, number=2, first=0):
    """Return the loss of a batch, and that of its micro-batches by what is seen in one of them."""
    parts = micro_batches(batch, number=number)
    with LossCalls(parts[first]) as inside:
        value = loss(**parts[first])
    reductions = reductions_of({"loss": value}, value, inside.calls, (), parts[first])
    shares = shares_of(reductions, parts, "Net")
    losses = [float(loss(**part)) * share for part, share in zip(parts, shares, strict=True) if share]
    return float(loss(**batch)), sum(losses)


X = torch.arange(4.0, dtype=torch.float64)
POSITIONS = {"start_positions": torch.tensor([0, 1, 2, 1]), "end_positions": torch.tensor([1, 3, 2, 2])}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (causal, {"labels": LABELS}),
        (causal, {"labels": LABELS, "num_items_in_batch": 6}),
        (causal, {"labels": LABELS, "num_items_in_batch": torch.tensor(6)}),
        (cut, {"labels": LABELS}),
        pytest.param(of_the_head_too, {"labels": LABELS}, marks=LINEAR),
        (masked, {"labels": LABELS}),
        (by_hand, {"labels": LABELS}),
        (one_by_one, {"labels": LABELS}),
        (summed, {"labels": LABELS}),
        (of_rows, {"labels": None}),
        (both_ends, POSITIONS),
        (of_tokens_that_are_there, {"labels": REPLACED, "mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]] * 2)}),
        (of_tokens_that_are_there, {"labels": REPLACED, "mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]] * 2)}),
        (listened("sum"), {"labels": LABELS}),
        (listened("mean"), {"labels": LABELS}),
        (of_no_function, {"labels": None}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_loss_of_micro_batches_is_that_of_the_batch(loss, more, first):
    wanted, got = together(loss, {"x": X, **more}, first=first)
    assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (two_means, "a mean over the labels that count, a mean over rows"),
        (some_of_them, "a mean over unknown"),
        (of_no_function, "a mean over rows, a mean over the labels that count"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_put_together_is_refused(loss, says):
    with pytest.raises(ConfigError, match=says):
        together(loss, {"x": X, "labels": LABELS})
    wanted, got = together(loss, {"x": X, "labels": LABELS}, number=1)
    assert wanted == got


def test_a_short_mask_that_looks_like_positions_is_not_taken_for_them():
    mask = torch.ones(4, 2, dtype=torch.long)
    positions = {"start_positions": torch.tensor([1, -100, 1, 1]), "end_positions": torch.tensor([2, -100, 1, 2])}

    def ends(x, attention_mask, **positions):
        return both_ends(x, **positions)

    wanted, got = together(ends, {"x": X, "attention_mask": mask, **positions}, number=4)
    assert got == pytest.approx(wanted, rel=1e-12)


def test_a_mask_that_leaves_nothing_out_tells_nothing_of_one_that_does():
    mask = torch.ones(4, 4, dtype=torch.bool)
    wanted, got = together(of_patches, {"x": X, "mask": mask})
    assert got == pytest.approx(wanted, rel=1e-12)
    mask[3, :3] = False
    for first in (0, 1):
        with pytest.raises(ConfigError, match="a mean over unknown"):
            together(of_patches, {"x": X, "mask": mask}, first=first)


def test_numbers_that_a_mask_selects_are_no_rows():
    batch = {"x": X, "labels": REPLACED, "mask": torch.tensor([[1, 1, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2)}
    with pytest.raises(ConfigError, match="a mean over unknown"):  # of the first half nobody can tell
        together(of_tokens_that_are_there, batch)
    wanted, got = together(of_tokens_that_are_there, batch, first=1)
    assert got == pytest.approx(wanted, rel=1e-12)


def test_a_mask_with_as_many_ones_as_there_are_targets_did_not_select_them():
    kinds = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])  # two ones in the first two rows

    def of_scores(x, labels, token_type_ids):
        return F.mse_loss(logits(x, 1)[:, 0], labels)

    batch = {"x": X, "labels": torch.tensor([0.5, 2.0, -1.0, 0.25], dtype=torch.float64), "token_type_ids": kinds}
    wanted, got = together(of_scores, batch)
    assert got == pytest.approx(wanted, rel=1e-12)


def test_a_trace_tells_it_where_gradients_are_off():
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 3] = False
    batch = {"x": torch.zeros(4, dtype=torch.float64), "mask": mask}  # all errors are alike
    kinds = []
    for traced in (False, True):
        with torch.no_grad(), LossCalls(batch, traced=traced) as inside:
            each = F.l1_loss(batch["x"][:, None].expand(-1, 4), torch.ones(4, 4).double(), reduction="none")
            loss = (each * mask).sum() / mask.sum()
        kinds += [found.kind for found in reductions_of({"loss": loss}, loss, inside.calls, (), batch)]
        assert torch.is_grad_enabled()
    assert kinds == ["rows", "unknown"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_mean_over_some_that_is_the_mean_over_all_by_accident_is_one_over_some(first):
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0]]).bool()
    x = torch.tensor([0.0, 0.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)

    def errors(x, mask):
        each = F.l1_loss(x[:, None].expand(-1, 4), torch.ones(len(x), 4, dtype=x.dtype), reduction="none")
        return (each * mask).sum() / mask.sum()

    with pytest.raises(ConfigError, match="a mean over unknown"):
        together(errors, {"x": x, "mask": mask}, first=first)


def test_nothing_finite_is_near_to_what_is_not():
    odd = float("inf"), float("-inf"), float("nan")
    assert _near(1.0, 1.0009)
    assert not any(_near(1.0, number) or _near(number, 1.0) for number in odd)


def test_nobody_can_tell_of_labels_that_do_not_count():
    x, labels = X[:2], torch.full((2, 4), -100)
    with LossCalls({"x": x, "labels": labels}) as inside:
        value = causal(x, labels)
    (reduction,) = reductions_of({"loss": value}, value, inside.calls, (), {"x": x, "labels": labels})
    assert (reduction.kind, reduction.shifted) == ("labels", None)
    assert shares_of([reduction], [{"x": x, "labels": labels}], "Net") == [0.0]


def test_nobody_can_tell_of_a_sum_where_the_first_label_of_each_row_alone_counts():
    x, labels = X[:2], torch.full((2, 4), -100)
    labels[:, 0] = 3
    arguments = {"x": x, "labels": labels, "num_items_in_batch": 6}
    with LossCalls(arguments) as inside:
        value = causal(**arguments)
    (reduction,) = reductions_of({"loss": value}, value, inside.calls, (), arguments)
    assert (reduction.kind, reduction.shifted) == ("unknown", None)
    with LossCalls(arguments) as inside:  # over which labels a mean is one, they tell all the same
        value = causal(x, labels)
    (reduction,) = reductions_of({"loss": value}, value, inside.calls, (), arguments)
    assert (reduction.kind, reduction.shifted) == ("labels", True)


@pytest.mark.parametrize("first", [0, 1])
def test_a_sum_over_no_labels_has_no_share(first):
    labels = LABELS.clone()
    labels[2:] = -100
    wanted, got = together(causal, {"x": X, "labels": labels, "num_items_in_batch": 2}, first=first)
    assert got == pytest.approx(wanted, rel=1e-12)


def test_a_function_of_the_output_decides_where_it_computes():
    batch = {"x": X, "labels": LABELS}
    with LossCalls(batch) as inside:
        own = causal(**batch)
    with LossCalls(batch) as outside:
        value = of_rows(**batch)
    out = {"loss": own}
    assert [reduction.kind for reduction in reductions_of(out, value, inside.calls, outside.calls, batch)] == ["rows"]
    assert [reduction.shifted for reduction in reductions_of(out, out["loss"], inside.calls, (), batch)] == [True]
    assert reductions_of(out, own * 2, inside.calls, (), batch) == ()  # another number, made of nobody knows what


def test_what_has_no_rows_is_not_divided():
    batch = {"x": X, "logits_to_keep": torch.tensor([0, 3, 5, 7]), "cache_position": torch.arange(4)}
    parts = micro_batches(batch, number=2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(torch.equal(part[name], batch[name]) for part in parts for name in ("logits_to_keep", "cache_position"))
    assert [[*part] for part in parts] == [[*batch], [*batch]]


def test_functions_of_one_code_that_hold_something_else_are_others():
    """What is seen of one of them says nothing of the other."""

    def made(reduction):
        return lambda out, _: F.cross_entropy(out, out.argmax(-1), reduction=reduction)

    assert named(made("sum")) == named(made("sum")) != named(made("mean"))
