"""``python -m agentlightning`` is ``agl``."""

from agentlightning.cli.app import main

main()
