from __future__ import annotations

import sys
from pathlib import Path

# The models that several test modules share; the workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))
