"""Import paths for the test: its folder and tests/support. `make test-ray` runs it."""

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path[:0] = [str(Path(__file__).parent), str(SUPPORT), *map(str, SUPPORT.glob("*/"))]
os.environ["RAY_AUTH_MODE"] = "disabled"  # the cluster belongs to this process; otherwise Ray writes a token to the home folder
