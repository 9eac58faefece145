"""Write the section "Classes" of the README of every pack, from MODELS.md.

    python tools/pack_readmes.py            # say which are not current
    python tools/pack_readmes.py --write    # write them

The rest of a README is its pack's own.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

__all__ = ["current", "main"]

ROOT = Path(__file__).parents[1]

_LEGEND = """\
*tp*: numbers of tensor-parallel ranks that are tested, besides 1. *seq*: sequence parallelism. *loss*: split logits.
*gen*: generation. *rec*: recomputed blocks. *out*: outputs that can be asked for: A attentions and H hidden states
(in encoder-decoders the decoder's), E the encoder's attentions, C cross-attentions, R router logits. *sent*: the
collectives of one more block, forward+backward. An empty cell is what a class does not have, or what is refused.
"""


def current(pack: str, text: str, models: str) -> str:
    """Return the README of a pack with its classes as they are now.

    Args:
        pack: its name.
        text: its README, which has the heading.
        models: the text of MODELS.md.

    Raises:
        ValueError: the README has no such heading, or MODELS.md no such pack.
    """
    section = re.search(rf"^## {pack}\n\n(.*?)(?=^## |\Z)", models, re.MULTILINE | re.DOTALL)
    before, heading, after = text.partition("\n## Classes\n")
    if section is None or not heading:
        raise ValueError(f"{pack}: there is no heading 'Classes' in its README, or no section in MODELS.md")
    rest = re.search(r"^## .*", after, re.MULTILINE | re.DOTALL)
    return f"{before}{heading}\n{section[1].strip()}\n\n{_LEGEND}\n{rest[0] if rest else ''}".rstrip() + "\n"


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write those that are not current")
    write = parser.parse_args(arguments).write
    models = (ROOT / "MODELS.md").read_text(encoding="utf-8")
    stale = 0
    for readme in sorted(ROOT.glob("packs/*/README.md")):
        text = readme.read_text(encoding="utf-8")
        wanted = current(readme.parent.name, text, models)
        if text != wanted:
            stale += not write
            sys.stdout.write(f"{readme.relative_to(ROOT)} {'is written' if write else 'is not current'}\n")
            if write:
                readme.write_text(wanted, encoding="utf-8")
    return int(stale > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
