"""Questions that only a diagnosis or a test asks of a traced program: its memory, its
precision, what a value comes from, and records of a run."""
