"""Suites that others run on their own parts: ``agentlightning.testing.engine_contract`` on an engine."""
