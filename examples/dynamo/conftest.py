"""Import paths for the test: its folder and tests/support. `make test-dynamo` runs it."""

import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path[:0] = [str(Path(__file__).parent), str(SUPPORT), *map(str, SUPPORT.glob("*/"))]
