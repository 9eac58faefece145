"""Real English that every Python carries: the prose of its manual, as bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data.topics import topics

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Bytes to learn from, and bytes of other paragraphs to be judged by."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def read(cls) -> Text:
        """Take the paragraphs of the manual that are prose, each once, every tenth of them held out."""
        blocks = (block.strip() for name in sorted(topics) for block in re.split(r"\n\s*\n", topics[name]))
        # A sentence; not a heading, a line of grammar or an interpreter session.
        prose = (b for b in blocks if len(b) > 60 and b[0].isupper() and b[-1] in ".:" and not re.search("::=|>>>", b))
        paragraphs = list(dict.fromkeys(" ".join(block.split()) for block in prose))
        train = [paragraph for place, paragraph in enumerate(paragraphs) if place % 10]
        return cls(*(torch.tensor(list("\n".join(part).encode())) for part in (train, paragraphs[::10])))

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw sequences to learn from, (count, length)."""
        starts = torch.randint(len(self.train) - length, (count,), generator=generator)
        return torch.stack([self.train[start : start + length] for start in starts.tolist()])

    def prompt(self, length: int) -> str:
        """Return how the held-out text begins."""
        return bytes(self.held_out.tolist()).decode().splitlines()[0][:length]

    def baseline(self) -> float:
        """Return the held-out loss (nats per byte) of a table of byte pairs: to do better is to look further back."""
        train, held_out = self.train.tolist(), self.held_out.tolist()
        singles, pairs = Counter(train), Counter(pairwise(train))
        # 0.05 for each pair, so that one which was never seen has a probability.
        nats = [-math.log((pairs[a, b] + 0.05) / (singles[a] + 0.05 * 256)) for a, b in pairwise(held_out)]
        return sum(nats) / len(nats)
