"""What a run measures: time, memory, bytes."""
