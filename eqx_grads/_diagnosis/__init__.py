"""See where a gradient vanishes, explodes or is not finite: probes and reports."""
