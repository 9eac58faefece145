"""How mBART, Marian and Pegasus are sharded: as BART, under other names and with norms elsewhere."""

from __future__ import annotations

from typing import ClassVar

from shard_bart import heads, policy


class _MBart(policy.BartDecoderPolicy):
    """Norms before attention and feed-forward, and after the blocks."""

    family: ClassVar[str] = "MBart"
    ends: ClassVar[str] = "layer_norm"


class MBartModelPolicy(_MBart, policy.BartModelPolicy):
    """Encoder and decoder of mBART without a head."""


class MBartForConditionalGenerationPolicy(_MBart, heads.BartForConditionalGenerationPolicy):
    """Text to text, in languages that a first word names."""


class MBartForCausalLMPolicy(_MBart, heads.BartForCausalLMPolicy):
    """The decoder alone, as a language model."""


class MBartForSequenceClassificationPolicy(_MBart, heads.BartForSequenceClassificationPolicy):
    """A label for each sequence."""


class MBartForQuestionAnsweringPolicy(_MBart, heads.BartForQuestionAnsweringPolicy):
    """Scores for where an answer starts and ends."""


class _Marian(policy.BartDecoderPolicy):
    """Positions of sines, and no norm before or after the blocks."""

    family: ClassVar[str] = "Marian"


class MarianModelPolicy(_Marian, policy.BartModelPolicy):
    """Encoder and decoder of Marian without a head."""


class MarianMTModelPolicy(_Marian, heads.BartForConditionalGenerationPolicy):
    """A translation, from a vocabulary of its own if the configuration says so."""

    name: ClassVar[str] = "MTModel"


class MarianForCausalLMPolicy(_Marian, heads.BartForCausalLMPolicy):
    """The decoder alone, as a language model."""


class _Pegasus(policy.BartDecoderPolicy):
    """Positions of sines, norms before attention and feed-forward, and after the blocks."""

    family: ClassVar[str] = "Pegasus"
    ends: ClassVar[str] = "layer_norm"


class PegasusModelPolicy(_Pegasus, policy.BartModelPolicy):
    """Encoder and decoder of Pegasus without a head."""


class PegasusForConditionalGenerationPolicy(_Pegasus, heads.BartForConditionalGenerationPolicy):
    """A summary."""


class PegasusForCausalLMPolicy(_Pegasus, heads.BartForCausalLMPolicy):
    """The decoder alone, as a language model."""
