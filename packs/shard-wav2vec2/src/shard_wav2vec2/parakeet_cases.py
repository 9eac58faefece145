"""Tiny Parakeets for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_RELEASE = Version(transformers.__version__)
_WORDS, _BANDS, _SPECTRA, _FRAMES = 23, 8, 26, 7
_DROPOUTS = ("dropout", "dropout_positions", "activation_dropout", "attention_dropout")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, **options: Any) -> Any:
    """Return a tiny model of the class ``name``."""
    encoder: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "intermediate_size": 37,  # divides by no number of ranks
        "conv_kernel_size": 3,
        "convolution_bias": False,  # one in front of a batch norm has a gradient of nothing but rounding
        "subsampling_factor": 4,
        "subsampling_conv_channels": 6,
        "num_mel_bins": _BANDS,
        "layerdrop": 0.0,
        **dict.fromkeys(_DROPOUTS, dropout),
    }
    around = {"encoder_config": encoder, "vocab_size": _WORDS, "pad_token_id": 0, "blank_token_id": _WORDS - 1}
    around |= {"decoder_hidden_size": 20, "durations": [0, 1, 2]}
    settings = encoder if name == "ParakeetEncoder" else around
    return tiny(getattr(transformers, name), seed=seed, **{"attn_implementation": "eager", **settings, **options})


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded spectra (3, 26), of which convolutions make 7 frames, and words that they may be."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([26, 17, 22]).roll(seed)
    if Version("5.23") > _RELEASE:  # padded frames saw nothing, and were no numbers
        lengths = torch.full((3,), _SPECTRA)
    mask = (torch.arange(_SPECTRA) < lengths[:, None]).long()
    spectra = torch.randn(3, _SPECTRA, _BANDS, generator=generator, dtype=torch.float64) * mask[..., None]
    batch = {"input_features": spectra, "attention_mask": mask}
    words = torch.randint(1, _WORDS - 1, (3, 3), generator=generator)
    name = type(model).__name__.removeprefix("FSDP")
    if name == "ParakeetForCTC":
        # What labels were padded with; others were read as words, beyond the scores.
        padding = -100 if Version("5.21") <= _RELEASE else model.config.pad_token_id
        batch["labels"] = words.masked_fill(torch.arange(3) >= torch.tensor([[3], [1], [2]]).roll(seed, 0), padding)
    elif name != "ParakeetEncoder":
        batch["decoder_input_ids"] = words
    return batch


def transducer_loss(out: Any) -> Tensor:
    """Return a loss of all scores: that of transducers is computed in float32, or by another library."""
    return weighted_mean(out.logits)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "outputs": ("logits",),
        "layers": "encoder.layers",
        "sharded": ("self_attn.q_proj", "self_attn.o_proj", "bias_u", "linear1", "linear2"),
        "whole": ("conv",),
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 3},),
        "collectives": (3, 3),
        "supports": Supports(captured=("attentions", "hidden_states"), pipeline=False),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def cases() -> list[Case]:
    """Return a case for every class, in the releases in which they are served."""
    if Version("5.17") > _RELEASE:
        return []
    return [
        _case("parakeet_ctc", "ParakeetForCTC"),
        _case("parakeet_encoder", "ParakeetEncoder", loss=hidden_loss, outputs=("last_hidden_state",), layers="layers"),
        _case("parakeet_rnnt", "ParakeetForRNNT", loss=transducer_loss),
        _case("parakeet_tdt", "ParakeetForTDT", loss=transducer_loss),
    ]
