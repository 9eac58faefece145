"""Tiny models and batches for the cases of packs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardcore_testing import encoder_decoder_batch, hidden_loss, randomized, text_batch, tiny


class Net(nn.Module):
    config_class = SimpleNamespace

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.linear, self.norm = nn.Linear(config.width, 40), nn.LayerNorm(40)


def test_every_parameter_is_random_and_norms_keep_tokens_apart():
    net = tiny(Net, seed=3, width=30)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float64}
    assert all(parameter.unique().numel() > 10 for parameter in net.parameters())
    assert abs(net.norm.weight.mean() - 1) < 0.2 > abs(net.linear.weight.mean())
    again, other = (randomized(Net(net.config), seed) for seed in (3, 4))
    assert torch.equal(again.linear.weight, net.linear.weight)
    assert not torch.equal(other.linear.weight, net.linear.weight)


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        ("Model", {}),
        ("ForCausalLM", {"labels": (3, 7)}),
        ("LMHeadModel", {"labels": (3, 7)}),
        ("ForMaskedLM", {"labels": (3, 7)}),
        ("ForTokenClassification", {"labels": (3, 7)}),
        ("ForSequenceClassification", {"labels": (3,)}),
        ("ForMultipleChoice", {"labels": (3,)}),
        ("ForQuestionAnswering", {"start_positions": (3,), "end_positions": (3,)}),
    ],
)
def test_a_batch_has_what_the_head_learns_from(head, labels):
    model = type(f"Some{head}", (), {"config": SimpleNamespace(vocab_size=11, num_labels=3)})()
    batch = text_batch(model, 1)
    ids, mask = batch.pop("input_ids"), batch.pop("attention_mask")
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == labels
    assert ids.shape == mask.shape == ((3, 2, 7) if head == "ForMultipleChoice" else (3, 7))
    assert ids.max() < 11
    assert bool(((ids == 0) == (mask == 0)).all())
    assert sorted(set(mask.flatten(0, -2).sum(-1).tolist())) == [2, 5, 7]
    other = text_batch(model, 0)["attention_mask"]
    assert not torch.equal(mask, other)
    if "labels" in batch and batch["labels"].ndim == 2:
        assert bool((batch["labels"][mask == 0] == -100).all())
        assert bool((batch["labels"][mask == 1] >= 0).any())


def test_the_loss_depends_on_everything_that_was_returned():
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    hidden_loss(SimpleNamespace(last_hidden_state=hidden, pooler_output=pooled)).backward()
    assert bool((hidden.grad != 0).all())
    assert bool((pooled.grad != 0).all())
    hidden_loss(SimpleNamespace(last_hidden_state=hidden)).backward()


@pytest.mark.parametrize(
    ("head", "more"),
    [
        ("Model", {"decoder_input_ids": (3, 5)}),
        ("EncoderModel", {}),
        ("ForConditionalGeneration", {"labels": (3, 5)}),
        ("ForCausalLM", {"labels": (3, 7), "encoder_hidden_states": (3, 5, 6)}),
        ("ForTokenClassification", {"labels": (3, 7)}),
        ("ForSequenceClassification", {"labels": (3,)}),
        ("ForQuestionAnswering", {"start_positions": (3,), "end_positions": (3,)}),
    ],
)
def test_a_batch_of_an_encoder_decoder(head, more):
    config = SimpleNamespace(vocab_size=11, decoder_vocab_size=7, num_labels=3, eos_token_id=1, d_model=6)
    batch = encoder_decoder_batch(type(f"Some{head}", (), {"config": config})(), 0)
    ids, mask = batch.pop("input_ids"), batch.pop("attention_mask")
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == more
    assert mask.sum(-1).tolist() == [7, 4, 6]
    assert bool(((ids == 0) == (mask == 0)).all())
    assert (ids == 1).sum(-1).tolist() == [1, 1, 1]
    for words in (batch.get("decoder_input_ids"), batch.get("labels") if head == "ForConditionalGeneration" else None):
        assert words is None or bool((words < 7).all())
