"""Where a model can be cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Where a model can be cut, by names relative to it: of submodules, or of parameters of the model itself.

    Together they hold every parameter, each once.

    Attributes:
        first: submodules that only the first stage needs (embeddings).
        blocks: the list of repeated blocks, or several (an encoder's and a decoder's), in the order in which they run.
        between: submodules that run between two lists of blocks (an encoder's last norm, a decoder's embeddings).
        last: submodules that only the last stage needs.
        everywhere: submodules that every stage needs.
    """

    first: tuple[str, ...] | str = ()
    blocks: tuple[str, ...] | str = ()
    between: tuple[str, ...] | str = ()
    last: tuple[str, ...] | str = ()
    everywhere: tuple[str, ...] | str = ()

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of blocks."""
        return _names(self.blocks)

    @property
    def around(self) -> tuple[str, ...]:
        """The modules around the lists of blocks, without the model itself, from the outside to the inside."""
        holders = (".".join(name.split(".")[:depth]) for name in self.lists for depth in range(1, name.count(".") + 1))
        return tuple(dict.fromkeys(holders))

    def under(self, prefix: str, *, then: tuple[str, ...] | str = ()) -> Stages:
        """Return the stages of a model that holds this one as ``prefix`` and runs ``then`` after it."""

        def moved(names: tuple[str, ...] | str) -> tuple[str, ...]:
            return tuple(f"{prefix}.{name}" for name in _names(names))

        return replace(
            self,
            first=moved(self.first),
            blocks=moved(self.blocks),
            between=moved(self.between),
            last=(*moved(self.last), *_names(then)),
            everywhere=moved(self.everywhere),
        )


def _names(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
