"""``python -m agentlightning``, which is ``agl``."""


def main() -> None:
    """Entry point: hides this process's memory before anything else is imported."""
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()
    from agentlightning.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
