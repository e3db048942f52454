"""Scripts of one folder import one another by their names."""

import sys

from tests.programs import ROOT

sys.path[:0] = [str(ROOT / "scripts" / folder) for folder in ("bench", "upstream")]
