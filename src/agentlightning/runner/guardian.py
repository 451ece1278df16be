"""Outlives a worker for a moment to end the programs that the worker can no longer end itself, because it was SIGKILLed.

Run as a file (``python -I -S guardian.py MARK``), so that it costs 15 ms and no package import. Its standard input is a pipe
from the worker: lines ``+GROUP`` and ``-GROUP`` say which process groups run; end of file means that the worker is gone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    location = importlib.util.spec_from_file_location("processes", Path(__file__).with_name("processes.py"))
    assert location is not None and location.loader is not None
    processes = importlib.util.module_from_spec(location)
    location.loader.exec_module(processes)
    for group in groups:
        processes.kill_group(group)
    processes.kill_marked(sys.argv[1])


if __name__ == "__main__":
    main()
