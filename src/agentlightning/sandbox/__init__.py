"""Sandboxes in which command agents run: each attempt in one of its own, whose only network is the gateway."""
