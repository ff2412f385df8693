"""The made-up runs are those of the tests of the followers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tracking"))
