"""Online learning: derivatives of a scan that are computed in the order of time."""
