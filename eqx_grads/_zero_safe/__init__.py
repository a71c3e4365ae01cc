"""`zero_safe`: what a selection did not take contributes nothing to a derivative.

`ranges.py` and `analysis.py` find the equations whose derivative may not be finite. `masks.py`
finds the elements from which a taken path leads to the result, and those to which one leads
from the inputs. `transform.py` puts them together.
"""
