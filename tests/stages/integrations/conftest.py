"""Stand-ins for frameworks that are not installed; those that are come first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support" / "stand_ins"))
