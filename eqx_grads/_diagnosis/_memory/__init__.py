"""What is kept for the backward pass, and what to checkpoint: `explain_memory`."""
