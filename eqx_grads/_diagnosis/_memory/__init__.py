"""`explain_memory`: the values that are kept for the backward pass, and what to checkpoint."""
