"""Serving: users of a trained model, in sessions that keep one version, and their feedback as reward.

An edge: nothing in the core imports it. The gateway loads `sessions.py` by its ``--clients`` option; ``agl serve --policy``
drives the rest.
"""
