"""What the test imports lies beside it and in tests/support; `make test-dynamo` runs it."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests" / "support")]
