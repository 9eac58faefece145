"""What tests of the clients share with the core's: its small models."""

from __future__ import annotations

import sys
from pathlib import Path

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "shardcore" / "tests" / "support"))
