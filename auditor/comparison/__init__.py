"""Two checkpoints, or runs, held against each other: equal, equal up to round-off, or different, and where."""
