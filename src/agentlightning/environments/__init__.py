"""Environments without code: tasks, agent and reward of something that exists, by its name.

``agl train --env textarena:FrozenLake-v0``. An environment makes its tasks and plays one with a model behind a base URL:
to the rest of the system it is a function agent with two files of tasks. Only `agent.py` knows the runner.
"""
