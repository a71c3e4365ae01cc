"""The guard: checks of the whole library that find unknown faults."""
