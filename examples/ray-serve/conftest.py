"""What the test imports lies beside it and in tests/support; `make test-ray` runs it."""

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path[:0] = [str(Path(__file__).parent), str(SUPPORT), *map(str, SUPPORT.glob("*/"))]
os.environ["RAY_AUTH_MODE"] = "disabled"  # for a cluster of this process alone; else Ray leaves a token in the home folder
