"""Processes, background loops, files on disk and code by name: what every part may use, and knows of none."""
