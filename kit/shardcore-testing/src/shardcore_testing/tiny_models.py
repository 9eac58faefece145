"""Tiny models of transformers for `shardcore_testing.Case`: what the cases of most packs are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_STD = 0.2
_ROWS, _LENGTH, _WORDS = 3, 7, 5  # no number of ranks divides any
_PADDING = ((0, 3, 1), (2, 0, 5), (4, 4, 0))


def tiny(model_class: Any, *, seed: int = 0, dropout: float | None = None, std: float = _STD, **settings: Any) -> Any:
    """Return a model of transformers in float64, with every parameter random; experts are multiplied one by one.

    Args:
        model_class: its class, such as ``transformers.OPTForCausalLM``.
        seed: of the parameters.
        dropout: of every dropout that its configuration, or one inside of it, names; None leaves them as they are.
        std: of the parameters.
        **settings: of its configuration.
    """
    config = model_class.config_class(**settings)
    if dropout is not None:
        set_dropouts(config, dropout)
    model = model_class(config)
    for config in [module.config for module in model.modules() if hasattr(module, "config")]:
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # the default multiplies in no float64
    return randomized(model, seed, std)


def set_dropouts(config: Any, probability: float) -> None:
    """Set what a configuration of transformers, or one inside of it, says of dropouts, by its name."""
    if not hasattr(config, "classifier_dropout"):
        config.classifier_dropout = probability  # without it, a head for the classes of tokens drops a tenth
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            set_dropouts(value, probability)
        elif is_dropout(name, value):
            setattr(config, name, probability)


def is_dropout(name: str, value: Any) -> bool:
    """Tell whether a field of a configuration is the probability of a dropout, but not of whole layers."""
    named = "drop" in name and "layerdrop" not in name.replace("_", "")
    return (isinstance(value, float) and named) or (value is None and name.endswith("_dropout"))


def randomized(model: nn.Module, seed: int = 0, std: float = _STD) -> nn.Module:
    """Fill the parameters of ``model`` at random, biases and scales too, and return it in float64.

    The weights of norms lie around 1: around 0, tokens would differ by little where a block ends with a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            middle = float("Norm" in type(module).__name__)
            for name, parameter in module.named_parameters(recurse=False):
                around = middle if name == "weight" else 0.0
                parameter.copy_(around + std * torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
    return model.double()


def text_batch(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, 7) with what the head of ``model`` learns from; the padding differs with the seed.

    The head is told by the name of the class, as transformers names them; multiple choice has ids (3, 2, 7).
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    name, config = type(model).__name__.removeprefix("FSDP"), model.config
    shape = (_ROWS, 2, _LENGTH) if name.endswith("MultipleChoice") else (_ROWS, _LENGTH)
    lengths = torch.tensor([_LENGTH - pads for pads in _PADDING[seed % len(_PADDING)]])
    mask = (torch.arange(_LENGTH) < lengths[:, None]).long()
    mask = mask.view(_ROWS, *(1,) * (len(shape) - 2), _LENGTH).expand(shape).contiguous()
    ids = (1 + integers(config.vocab_size - 1, *shape)) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    ignored = mask == 0
    match name.rpartition("For")[2] if "For" in name else name[-9:]:
        case "PreTraining" if model.get_output_embeddings() is None:
            batch["labels"] = integers(2, *shape)  # no vocabulary: whether a token was replaced
        case "MaskedLM" | "PreTraining":
            batch["labels"] = ids.masked_fill(ignored | (integers(2, *shape) == 1), -100)
        case "CausalLM" | "HeadModel":
            batch["labels"] = ids.masked_fill(ignored, -100)
        case "TokenClassification":
            batch["labels"] = integers(config.num_labels, *shape).masked_fill(ignored, -100)
        case "SequenceClassification":
            batch["labels"] = integers(config.num_labels, _ROWS)
        case "MultipleChoice" | "NextSentencePrediction":
            batch["labels"] = integers(2, _ROWS)
        case "QuestionAnswering":
            batch["start_positions"] = integers(3, _ROWS)
            batch["end_positions"] = batch["start_positions"] + 1
    return batch


def encoder_decoder_batch(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, 7), each row with one end, and what an encoder-decoder learns from.

    That are labels for its head, told by the name of its class, or ids of the decoder (3, 5). A decoder alone
    (``ForCausalLM``) gets states (3, 5, S) to attend to, an encoder alone (``EncoderModel``) nothing else.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    name, config = type(model).__name__.removeprefix("FSDP"), model.config
    lengths = _LENGTH - torch.tensor(_PADDING[seed % len(_PADDING)])
    mask = (torch.arange(_LENGTH) < lengths[:, None]).long()
    ids = integers(3, config.vocab_size, _ROWS, _LENGTH) * mask
    ids[torch.arange(_ROWS), lengths - 1] = config.eos_token_id
    batch = {"input_ids": ids, "attention_mask": mask}
    words = integers(3, getattr(config, "decoder_vocab_size", None) or config.vocab_size, _ROWS, _WORDS)
    match name.rpartition("For")[2]:
        case "CausalLM":
            states = torch.randn(_ROWS, _WORDS, config.d_model, generator=generator, dtype=torch.float64)
            batch |= {"labels": ids.masked_fill(mask == 0, -100), "encoder_hidden_states": states}
        case "ConditionalGeneration" | "MarianMTModel":
            batch["labels"] = words.masked_fill(torch.arange(_WORDS) >= lengths[:, None] - 1, -100)
        case "SequenceClassification":
            batch["labels"] = integers(0, config.num_labels, _ROWS)
        case "TokenClassification":
            batch["labels"] = integers(0, config.num_labels, _ROWS, _LENGTH).masked_fill(mask == 0, -100)
        case "QuestionAnswering":
            batch["start_positions"] = integers(0, 3, _ROWS)
            batch["end_positions"] = batch["start_positions"] + 1
        case other if not other.endswith("EncoderModel"):
            batch["decoder_input_ids"] = words
    return batch


def hidden_loss(out: Any) -> Tensor:
    """Return a loss of a model without a head: a weighted mean of hidden states, and of what it pooled from them."""
    returned = (out.last_hidden_state, getattr(out, "pooler_output", None))
    return weighted_mean(*(tensor for tensor in returned if tensor is not None))


def weighted_mean(*tensors: Tensor) -> Tensor:
    """Return the sum of the means of ``tensors``, each with fixed random weights: a loss that sees every element.

    Not a sum: gradients then stay below 1, as those of the losses that heads compute. The weights are the same on every
    device.
    """
    generator = torch.Generator().manual_seed(7)
    weights = (torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t) for t in tensors)
    return torch.stack([(t * w).mean() for t, w in zip(tensors, weights, strict=True)]).sum()
