"""Workers: processes that claim rollouts, run agents on them and report how they ended."""
