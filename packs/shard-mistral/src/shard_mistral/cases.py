"""Tiny Mistrals, Ministrals and Mixtrals for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shard_llama.cases import decoder_cases
from shardcore_testing import Case, Supports, hidden_loss


def build(name: str, *, dropout: float = 0.0, seed: int = 0, experts: str = "eager", **options: Any) -> Any:
    """Return a model whose every parameter is drawn at random; ``experts`` is how a Mixtral of transformers 5 runs."""
    family = name[: len("Mistral")]
    settings: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 43,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "sliding_window": None,
        "num_labels": 3,
        "attention_dropout": dropout,
        "classifier_dropout": dropout,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
        "use_cache": False,
        **({"num_local_experts": 5, "num_experts_per_tok": 2} if family == "Mixtral" else {}),
        **options,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = experts  # the default multiplies in no float64
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, 7) with the labels of the model's class; the padding differs with the seed."""
    generator = torch.Generator().manual_seed(seed)
    config, rows, length = model.config, 3, 7
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, pads in enumerate(((0, 3, 1), (2, 0, 5), (4, 4, 0))[seed % 3]):
        mask[row, length - pads :] = 0
    ids = torch.randint(1, config.vocab_size, (rows, length), generator=generator) * mask
    labels = torch.randint(0, config.num_labels, (rows, length), generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask}
    match type(model).__name__[len("Mistral") :]:
        case "ForCausalLM":
            return {**batch, "labels": ids.masked_fill(mask == 0, -100)}
        case "ForSequenceClassification":
            return {**batch, "labels": labels[:, 0]}
        case "ForTokenClassification":
            return {**batch, "labels": labels.masked_fill(mask == 0, -100)}
        case "ForQuestionAnswering":
            return {**batch, "start_positions": labels[:, 0], "end_positions": labels[:, 0] + 1}
    return batch


#: Before, each expert was a module of its own, which no rank has alone.
_TOGETHER = Version("5.0.0rc0") <= Version(transformers.__version__)
_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "embed_tokens")
_OUTPUTS = {"Model": ("last_hidden_state",), "ForQuestionAnswering": ("start_logits", "end_logits")}
_REFUSED = ({"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 56},)


def _case(name: str, family: str, kind: str, **fields: Any) -> Case:
    mixtral = family == "Mixtral"
    # What classifies hands no router's logits on.
    routing = ("router_logits",) if mixtral and kind in ("Model", "ForCausalLM") else ()
    settings: dict[str, Any] = {
        "build": partial(build, f"{family}{kind}", **fields.pop("config", {})),
        "inputs": inputs,
        "outputs": _OUTPUTS.get(kind, ("logits",)),
        "options": {"attn_implementation": ("sdpa", "eager")},
        "sharded": (*_ATTENTION, *(("experts",) if mixtral else ("mlp.gate_proj", "mlp.down_proj"))),
        "whole": ("gate",) if mixtral else (),
        # The gradient of a router's weight is summed by itself.
        "collectives": (2, 3) if mixtral else (2, 2),
        "refuses": (*_REFUSED, *(({"router_jitter_noise": 0.1},) if mixtral else ())),
        "supports": Supports(
            sequence=True,
            context=True,
            experts=mixtral and _TOGETHER,
            captured=("attentions", "hidden_states", *routing),
            generation=kind == "ForCausalLM",
        ),
        **fields,
    }
    return Case(name=name, **settings)


def cases() -> list[Case]:
    """Return a case for every class, and for what decoders and experts differ in."""
    shared = {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 97, "sliding_window": 4}
    heads = {
        "sequence_classification": "ForSequenceClassification",
        "token_classification": "ForTokenClassification",
        "question_answering": "ForQuestionAnswering",
    }
    families = {"mistral": "Mistral", "mixtral": "Mixtral"}
    return [
        _case("causal_lm", "Mistral", "ForCausalLM"),
        _case("tied_shared_kv", "Mistral", "ForCausalLM", config=shared, sharded=("q_proj",)),
        _case("experts_causal_lm", "Mixtral", "ForCausalLM"),
        _case("experts_batched", "Mixtral", "ForCausalLM", config={"experts": "batched_mm"}),
        *(_case(f"{name}_model", family, "Model", loss=hidden_loss) for name, family in families.items()),
        *(_case(f"{n}_{what}", f, kind) for n, f in families.items() for what, kind in heads.items()),
        *_ministrals(),
    ]


def _ministrals() -> list[Case]:
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "head_dim": 16}
    # What scales queries grows after so many tokens.
    rope = {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    usual = {"Ministral": window, "Ministral3": {"head_dim": 16, "rope_parameters": rope}}
    here = usual if _TOGETHER else ()
    return [case for f in here for case in decoder_cases(f, prefix=f"{f.lower()}_", usual=usual[f])]
