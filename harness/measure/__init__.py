"""What a run measures, and the arithmetic it is measured against: time, memory, bytes, FLOPs, utilisation."""
