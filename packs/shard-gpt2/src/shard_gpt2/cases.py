"""Tiny GPT-2s and GPTBigCodes for the conformance kit: every class that the pack serves, and cross-attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss

_OLD = Version(transformers.__version__) < Version("5")
_PLAIN = Supports(sequence=True, context=True, captured=("attentions", "hidden_states"))


def build(name: str, *, seed: int = 0, dropout: float = 0.0, **options: Any) -> Any:
    """Return the model of class ``name`` in float64, every parameter random, and no position like another."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "n_embd": 48,
        "n_inner": 83,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "summary_first_dropout": dropout,
        "classifier_dropout": dropout,
        "num_labels": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "use_cache": False,
        "attn_implementation": "sdpa",
        **options,
    }
    config = getattr(transformers, name).config_class(**settings)
    if name == "GPT2DoubleHeadsModel":
        config.num_labels = 1  # one score for each choice
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            spread = 1.0 if "wpe" in label else 0.2
            middle = float("ln_" in label and label.endswith("weight"))  # around 0, every token would be the same
            parameter.copy_(middle + spread * torch.randn(parameter.shape, generator=generator))
    return model.double()


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch of three right-padded sequences for ``model``, with its labels."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    name, config = type(model).__name__.removeprefix("FSDP"), model.config
    shape = (3, 2, 7) if name == "GPT2DoubleHeadsModel" else (3, 7)
    lengths = torch.tensor([7, 5, 6]).roll(seed)
    mask = (torch.arange(7) < lengths[:, None]).long().view(3, *(1,) * (len(shape) - 2), 7).expand(shape).contiguous()
    ids = (1 + integers(config.vocab_size - 1, *shape)) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    if config.add_cross_attention:
        states = torch.randn(3, 6, config.n_embd, generator=generator, dtype=torch.float64)
        theirs = (torch.arange(6) < torch.tensor([6, 4, 5])[:, None]).long()
        batch |= {"encoder_hidden_states": states, "encoder_attention_mask": theirs}
    match name:
        case "GPT2LMHeadModel" | "GPTBigCodeForCausalLM":
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        case "GPT2DoubleHeadsModel":
            last = mask.sum(-1) - 1
            batch |= {"labels": ids.masked_fill(mask == 0, -100), "mc_token_ids": last, "mc_labels": integers(2, 3)}
        case "GPT2ForTokenClassification" | "GPTBigCodeForTokenClassification":
            batch["labels"] = integers(config.num_labels, *shape).masked_fill(mask == 0, -100)
        case "GPT2ForSequenceClassification" | "GPTBigCodeForSequenceClassification":
            batch["labels"] = integers(config.num_labels, 3)
        case "GPT2ForQuestionAnswering":
            batch["start_positions"] = integers(3, 3)
            batch["end_positions"] = batch["start_positions"] + 1
    return batch


def both_losses(out: Any) -> Tensor:
    """Return the sum of the losses of words and of choices."""
    loss: Tensor = out.loss + out.mc_loss
    return loss


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "options": {"attn_implementation": ("sdpa", "eager")},
        "outputs": ("logits",),
        "layers": "transformer.h",
        "collectives": (2, 3),  # in the backward, one for the bias of the fused linear, which every rank holds whole
        "sharded": ("wte.weight", "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.bias", "mlp.c_proj.weight"),
        "refuses": ({"n_head": 3},),
        "supports": _PLAIN,
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class, and one for a decoder that attends to an encoder's states."""
    generates = replace(_PLAIN, generation=True)
    crosses = Supports(sequence=True, captured=("attentions", "cross_attentions", "hidden_states"), generation=True)
    whole = Supports(captured=("attentions", "hidden_states"))
    scaled = {"scale_attn_by_inverse_layer_idx": (False, True), "scale_attn_weights": (True, False)}
    both = {"attn_implementation": ("sdpa", "eager")}
    return [
        _case("causal_lm", "GPT2LMHeadModel", options={**both, **scaled}, supports=generates),
        _case("model", "GPT2Model", outputs=("last_hidden_state",), loss=hidden_loss, layers="h"),
        _case(
            "untied",
            "GPT2LMHeadModel",
            usual={"tie_word_embeddings": False},
            sharded=("lm_head.weight",),
            supports=generates,
        ),
        _case(
            "cross_attention",
            "GPT2LMHeadModel",
            usual={"add_cross_attention": True},
            sharded=("crossattention.c_attn.weight", "crossattention.q_attn.weight"),
            collectives=(3, 5),  # of each fused linear the gradient of the bias, which is whole, is summed
            supports=crosses,
        ),
        _case(
            "double_heads", "GPT2DoubleHeadsModel", outputs=("logits", "mc_logits"), loss=both_losses, supports=whole
        ),
        _case("sequence_classification", "GPT2ForSequenceClassification"),
        _case("token_classification", "GPT2ForTokenClassification"),
        _case("question_answering", "GPT2ForQuestionAnswering", outputs=("start_logits", "end_logits")),
        *_bigcode(),
    ]


def _bigcode() -> list[Case]:
    """Return the cases of GPTBigCode: one KV head for all, which every rank computes, or one for each head."""
    plain = replace(_PLAIN, context=False, checkpointing=not _OLD)  # where transformers 4 recomputes nothing
    fields: dict[str, Any] = {"supports": plain, "options": {"attn_implementation": ("sdpa", "eager")}}
    return [
        _case("bigcode_causal_lm", "GPTBigCodeForCausalLM", **{**fields, "supports": replace(plain, generation=True)}),
        _case("bigcode_own_kv_heads", "GPTBigCodeForCausalLM", usual={"multi_query": False}, **fields),
        _case(
            "bigcode_model", "GPTBigCodeModel", outputs=("last_hidden_state",), loss=hidden_loss, layers="h", **fields
        ),
        _case("bigcode_sequence_classification", "GPTBigCodeForSequenceClassification", **fields),
        _case("bigcode_token_classification", "GPTBigCodeForTokenClassification", **fields),
    ]
