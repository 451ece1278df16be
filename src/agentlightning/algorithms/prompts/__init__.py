"""Prompt optimisation: searches over the texts of an agent's prompts. Pure; rollouts and models are handed in."""
