"""The guard: every public op keeps the contract, in each of its properties."""
