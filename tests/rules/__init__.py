"""Sample rules, each written once: `formulas`, and the `ways` to make rules of them.

The other collections use these rules: `ops` (one rule in every kind), `right_rules` (over all
kinds of arguments), `faults` (with one thing wrong).
"""
