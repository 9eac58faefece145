"""The colours of pages and pictures, on a light and on a dark screen."""

from __future__ import annotations

#: Of `shardcore_planner.KINDS`, in their order.
KINDS_OF_MEMORY = ("#2f6fa8", "#67b0de", "#8fcbbd", "#c9a0dc", "#f4a259")

#: What a rank of a pipeline does: a forward, a backward, and its halves.
KINDS_OF_WORK = {"F": "#67b0de", "B": "#f4a259", "I": "#f4a259", "W": "#8fcbbd"}

#: A stylesheet. An element says its light colour itself too, for programs that know no variables.
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #cfd6df; --back: #ffffff; --card: #f5f7fa;
  --limit: #c1121f; --away: #dfe6ee; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf2; --soft: #9aa7b6; --line: #3a4553; --back: #12171d;
  --card: #1b222b; --limit: #ff6b6b; --away: #2b3541; } }
svg text { fill: var(--ink); } svg .on { fill: #ffffff; } svg .work { fill: #12171d; }
svg .back { fill: var(--back); } svg .away { fill: var(--away); } svg .line { stroke: var(--line); }
svg .edge { stroke: var(--back); } svg .limit { stroke: var(--limit); } svg text.limit { fill: var(--limit);
  stroke: none; }
"""
