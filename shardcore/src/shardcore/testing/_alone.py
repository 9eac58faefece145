"""What the kit asks of a fresh process: discovery without torch.

Run as ``python -m shardcore.testing._alone PLUGIN``; it writes JSON.
"""

from __future__ import annotations

import json
import sys

_HEAVY = ("torch", "transformers", "timm", "numpy")


def main(plugin: str) -> list[str]:
    """Return the problems of the discovery."""
    from shardcore.plugins.registry import GROUP, Registry

    if plugin:
        from importlib_metadata import EntryPoint

        registry = Registry.discover([EntryPoint(name=plugin.partition(".")[0], value=plugin, group=GROUP)])
    else:
        registry = Registry.discover()
    problems = [f"{pack}: {type(pack.error).__name__}: {pack.error}" for pack in registry.packs if pack.error]
    heavy = [name for name in _HEAVY if name in sys.modules]
    if heavy:
        problems.append(f"discovering {plugin or 'the packs'} imports {', '.join(heavy)}; name them in strings only")
    return problems


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
