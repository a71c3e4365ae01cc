"""Random programs with random rules, in chains of transformations: `test_programs.py`."""
