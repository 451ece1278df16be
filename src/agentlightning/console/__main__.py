"""The console's process as a child: ``python -m agentlightning.console --fd N``, of ``agl train --console`` and the demo's.

It gets a listening socket, and by its standard input the store's URL and key, and the token of its own URL; it ends with its
parent, and is nothing to it: a run goes on whatever becomes of who looks at it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from agentlightning.console.server import TOKEN_VARIABLE, run
from agentlightning.errors import AgentLightningError, printable
from agentlightning.runtime.children import end_with_parent, give_way, keep_files_private
from agentlightning.store.open import store_url

NICENESS = 10
"""Once it has started: on a busy machine those who look wait, not the run. With 19 a page took a minute to open."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the parent ends; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentlightning.console", description="Serve the console.")
    parser.add_argument("--fd", type=int, required=True, help="a listening socket handed down by the parent")
    options = parser.parse_args(arguments)
    os.environ.update(end_with_parent())
    keep_files_private()
    try:
        token = os.environ.pop(TOKEN_VARIABLE)
        run(store_url(None), socket.socket(fileno=options.fd), token, lambda: give_way(NICENESS))
    except AgentLightningError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
