"""Random programs with random rules, in random chains of transformations: `test_fuzz.py`."""
