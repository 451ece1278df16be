"""What tests of others' clients share: the doubles of other tests. Suites are run by the Python of their environments."""

from __future__ import annotations

import sys
from pathlib import Path

for shared in ("gateway", "sdk"):  # scripted engine, server as a process; a template with tools
    sys.path.append(str(Path(__file__).parents[1] / shared))

collect_ignore = ["suites"]
