"""How decoders with experts are sharded that are else built like Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shardcore.policy import Rule
from shardcore.styles import experts


class MixturePolicy(LlamaPolicy):
    """A decoder with experts in its blocks, or an MLP in some of them. Families derive from it, and say what differs.

    Since transformers 5 the experts of a block are one module, before a list.
    """

    #: What a block calls its mixture, and its mixture the router.
    mixture: ClassVar[str] = "mlp"
    router: ClassVar[str] = "gate"
    #: The place of the logits in what the router returns, if they are captured for a balancing loss.
    captured: ClassVar[int | None] = 0
    #: The expert that every token visits besides its own, if there is one.
    shared: ClassVar[str | None] = None

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        columns, row = self.columns, self.row
        return [
            *(replace(rule, optional=True) for rule in super().feed_forward()),
            experts(
                self.mixture,
                router=self.router,
                captured=self.captured,
                col=columns,
                row=row,
                shared_col=tuple(f"{self.shared}.{name}" for name in columns) if self.shared else (),
                shared_row=f"{self.shared}.{row}" if self.shared else None,
                optional=True,
            ),
        ]
