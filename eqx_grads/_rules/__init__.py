"""How a function gets a rule: decorators, closure conversion, the primitives, shorthands."""
