"""Random programs with random rules, under random chains of transformations: `test_fuzz.py`."""
