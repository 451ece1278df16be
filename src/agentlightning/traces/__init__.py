"""Traces as data: files of spans and conversations become a recorded run. An edge: nothing above imports it but the CLI."""
