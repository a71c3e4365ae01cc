"""`zero_safe`: what a selection did not take contributes nothing to a derivative.

`ranges.py` and `analysis.py` find the equations whose derivative may not be finite,
`liveness.py` the elements from which a taken path leads to the result, `moved.py` those to
which one leads from the inputs, and `transform.py` puts them together.
"""
