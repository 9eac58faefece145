"""How mT5 and umT5 are sharded: as T5, under other names; every block of umT5 makes a bias of positions of its own."""

from __future__ import annotations

from typing import ClassVar

from shard_t5 import heads, policy


class MT5EncoderModelPolicy(policy.T5EncoderModelPolicy):
    """The encoder of mT5 alone."""

    family: ClassVar[str] = "MT5"


class MT5ModelPolicy(MT5EncoderModelPolicy, policy.T5ModelPolicy):
    """Encoder and decoder of mT5."""


class MT5ForConditionalGenerationPolicy(MT5ModelPolicy, heads.T5ForConditionalGenerationPolicy):
    """Text to text."""


class MT5ForQuestionAnsweringPolicy(MT5ModelPolicy, heads.T5ForQuestionAnsweringPolicy):
    """Scores for where an answer starts and ends."""


class MT5ForSequenceClassificationPolicy(MT5ModelPolicy, heads.T5ForSequenceClassificationPolicy):
    """A label for each sequence."""


class MT5ForTokenClassificationPolicy(MT5EncoderModelPolicy, heads.T5ForTokenClassificationPolicy):
    """A label for each token."""


class UMT5EncoderModelPolicy(policy.T5EncoderModelPolicy):
    """The encoder of umT5 alone."""

    family: ClassVar[str] = "UMT5"


class UMT5ModelPolicy(UMT5EncoderModelPolicy, policy.T5ModelPolicy):
    """Encoder and decoder of umT5."""


class UMT5ForConditionalGenerationPolicy(UMT5ModelPolicy, heads.T5ForConditionalGenerationPolicy):
    """Text to text."""


class UMT5ForQuestionAnsweringPolicy(UMT5ModelPolicy, heads.T5ForQuestionAnsweringPolicy):
    """Scores for where an answer starts and ends."""


class UMT5ForSequenceClassificationPolicy(UMT5ModelPolicy, heads.T5ForSequenceClassificationPolicy):
    """A label for each sequence."""


class UMT5ForTokenClassificationPolicy(UMT5EncoderModelPolicy, heads.T5ForTokenClassificationPolicy):
    """A label for each token."""
