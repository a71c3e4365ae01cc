"""`zero_safe`: what a selection did not take contributes nothing to a derivative.

`ranges.py` finds the equations whose derivative may not be finite, `liveness.py` the elements
from which a taken path leads to the result, `transform.py` puts the two together.
"""
