"""What the kit asks of a fresh process: discovery without torch.

Run as ``python -m shardcore_testing._alone PLUGIN ...``; it writes the problems of each plugin as JSON.
"""

from __future__ import annotations

import json
import sys

_HEAVY = ("torch", "transformers", "timm", "numpy")


def main(plugins: list[str]) -> dict[str, list[str]]:
    """Return the problems of the discovery of each plugin; what one imports is not looked for in those after it."""
    from shardcore.plugins.registry import GROUP, Registry

    found = {}
    for plugin in plugins:
        before = set(sys.modules)
        if plugin:
            from importlib_metadata import EntryPoint

            registry = Registry.discover([EntryPoint(name=plugin.partition(".")[0], value=plugin, group=GROUP)])
        else:
            registry = Registry.discover()
        found[plugin] = [f"{pack}: {type(pack.error).__name__}: {pack.error}" for pack in registry.packs if pack.error]
        if heavy := [name for name in _HEAVY if name in sys.modules.keys() - before]:
            what = plugin or "the packs"
            found[plugin].append(f"discovering {what} imports {', '.join(heavy)}; name them in strings only")
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
