"""The web console: a process of its own that reads a store and shows its runs, rollouts, calls and tokens."""
