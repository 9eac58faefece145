"""Where a model can be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

Names = tuple[str, ...] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Where a model can be cut, by names relative to it: of submodules, or of parameters and buffers of the model.

    Together the stages contain every parameter, each of its names exactly once: compiling a plan checks that. A name
    whose attribute is None in the model (a pooler that its configuration leaves out) contains nothing. If the attribute
    is missing in some models, its name is in ``optional`` too. A tied weight may be in several stages.

    Attributes:
        first: what only the first stage needs (embeddings).
        blocks: the `torch.nn.ModuleList` or `torch.nn.Sequential` of repeated blocks, or several (an encoder's and a
            decoder's), in the order in which they run.
        between: what runs between two lists of blocks (an encoder's last norm, a decoder's embeddings).
        last: what only the last stage needs.
        everywhere: what every stage needs; also what makes masks or positions, which do not go from stage to stage.
        optional: those of all these names that a model may lack.
    """

    first: Names = ()
    blocks: Names = ()
    between: Names = ()
    last: Names = ()
    everywhere: Names = ()
    optional: Names = ()

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of blocks."""
        return _names(self.blocks)

    @property
    def around(self) -> tuple[str, ...]:
        """The modules around the lists of blocks, without the model itself, from the outside to the inside."""
        holders = (".".join(name.split(".")[:depth]) for name in self.lists for depth in range(1, name.count(".") + 1))
        return tuple(dict.fromkeys(holders))

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield each name with the part (``"first"``, ...) that it is in, in the order in which they run."""
        for field in fields(self):
            if field.name != "optional":
                yield from ((field.name, name) for name in _names(getattr(self, field.name)))

    def holder(self, name: str) -> str | None:
        """Return what contains the parameter or buffer ``name``: a name in these stages, or that of a block in a list.

        ``"model.layers.0"`` contains ``"model.layers.0.mlp.weight"`` if ``blocks`` is ``"model.layers"``.
        """
        for part, held in self.parts():
            if part != "blocks" and name == held:
                return held
            if name.startswith(f"{held}."):
                block, _, inside = name[len(held) + 1 :].partition(".")
                if part != "blocks":
                    return held
                return f"{held}.{block}" if inside else None  # a list has blocks; nothing runs what is its own
        return None

    def under(self, prefix: str, *, then: Names = (), optional: Names = ()) -> Stages:
        """Return the stages of a model that has this one as its submodule ``prefix`` and runs ``then`` after it.

        Args:
            prefix: its name in that model.
            then: what is added to ``last``.
            optional: those of ``then`` that the model may lack.
        """
        moved = self.mapped(lambda name: f"{prefix}.{name}")
        return replace(
            moved,
            last=(*_names(moved.last), *_names(then)),
            optional=(*_names(moved.optional), *_names(optional)),
        )

    def mapped(self, change: Callable[[str], str | None]) -> Stages:
        """Return these stages with other names; a name for which ``change`` returns None is left out."""
        changed = {f.name: [change(name) for name in _names(getattr(self, f.name))] for f in fields(self)}
        return Stages(**{part: tuple(n for n in names if n is not None) for part, names in changed.items()})


def _names(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
