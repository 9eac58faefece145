"""Makes `vit_cases` importable, here and in the workers of the pool, which inherit the search path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
