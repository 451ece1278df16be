"""From what is recorded to what is trained on: records to trajectories, trajectories to sequences. Pure: no I/O."""
