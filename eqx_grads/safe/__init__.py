"""Mathematics whose derivatives are finite wherever the true ones are, at all magnitudes."""
