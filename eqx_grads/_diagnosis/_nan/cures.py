"""The kinds of `explain_nan`, and what to do about each of them."""

DEAD_BRANCH = "dead branch"
MASKED_PRODUCT = "zero mask"
ZERO_TIMES_INFINITY = "zero times infinity"
SINGULARITY = "true singularity"
INDETERMINATE = "0/0"
DOMAIN = "outside of the domain"
OVERFLOW = "overflow"
LARGE = "exceeds the threshold"
INPUT = "NaN in the input"
INFINITE_INPUT = "inf in the input"

_TWO_WHERES = "`jnp.where(ok, f(jnp.where(ok, x, 1.0)), other)`"
_ZERO_POLICY = 'define the derivative as zero with `eqg.zero_safe(loss, policy="zero")`.'

# For each kind. `{op}` is the primitive.
_OF_KINDS = {
    DEAD_BRANCH: f"Use `eqg.zero_safe(loss)`, or two `where`s: {_TWO_WHERES}.",
    MASKED_PRODUCT: "Use a `jnp.where` in place of the product, with `eqg.zero_safe(loss)` or "
    f"as {_TWO_WHERES}.",
    ZERO_TIMES_INFINITY: "The derivative of `{op}` is infinite there, and no selection makes "
    "the cotangent zero: terms of it cancel, or a product underflows. Keep the argument of "
    f"`{{op}}` away from that point (`x + eps`), or {_ZERO_POLICY}",
    SINGULARITY: "The derivative of `{op}` is infinite there. Keep its argument away from that "
    f"point (`x + eps`), or {_ZERO_POLICY}",
    INDETERMINATE: "The derivative of `{op}` is not defined there. Keep its argument away from "
    f"that point (`x + eps`), or {_ZERO_POLICY}",
    DOMAIN: "Clip the argument of `{op}` to its domain before the call.",
    OVERFLOW: "Keep the argument of `{op}` in range: subtract the maximum, or use logarithms.",
    LARGE: "Use `eqg.clip_gradient_norm` or `eqg.clip_gradient` on its argument.",
}

# For kinds whose cure differs if a value is bad, and not a cotangent.
_OF_VALUES = {
    SINGULARITY: "`{op}` is not finite there. Keep its argument away from that point "
    "(`x + eps`; for a matrix `a + eps * jnp.eye(n)`).",
    INDETERMINATE: "`{op}` is not defined there. Keep its arguments away from that point, "
    "with a `where` around the arguments.",
}

# For singular points of certain operations.
_CLIPPED = (
    "The derivative of `{op}` is infinite at 1 and -1. Clip its argument, which may round to "
    "them: `jnp.clip(x, -1 + eps, 1 - eps)`."
)
_OF_PRIMITIVES = {
    "acos": _CLIPPED,
    "asin": _CLIPPED,
    "log": "Keep the argument of `log` away from zero: `jnp.log(x + eps)`.",
    "pow": "The derivative of `x**y` is not finite where `x` is zero and `y` less than one. "
    "Use `(x + eps)**y`. For an exponent that is always whole, pass a Python `int`.",
    "atan2": "`arctan2` has no derivative at (0, 0). Replace the arguments there: "
    "`jnp.arctan2(jnp.where(ok, y, 0.0), jnp.where(ok, x, 1.0))`.",
}

# For formulas, see `formulas.py`.
_OF_FORMULAS = {
    "log of softmax": "Use `jax.nn.log_softmax(x)` in place of the logarithm of a softmax.",
    "log of sigmoid": "Use `jax.nn.log_sigmoid(x)` in place of the logarithm of a sigmoid.",
    "softplus": "Use `jax.nn.softplus(x)` in place of `log(1 + exp(x))`.",
    "logaddexp": "Use `jnp.logaddexp(x, y)` in place of `log(exp(x) + exp(y))`.",
    "logsumexp": "Use `jax.nn.logsumexp(x)` in place of the logarithm of a sum of `exp(x)`.",
    "softmax": "Use `jax.nn.softmax(x)`, which subtracts the maximum first.",
    "sigmoid": "Use `jax.nn.sigmoid(x)`, which has no overflow.",
    "norm": "The derivative of a norm is not defined at zero. Use `jnp.sqrt(jnp.sum(x**2) + "
    f"eps)`, or {_ZERO_POLICY}",
    "deviation": "The derivative of a standard deviation is not defined for equal numbers. Use "
    f"`jnp.sqrt(jnp.var(x) + eps)`, or {_ZERO_POLICY}",
    "x / |x|": "Use `jnp.sign(x)` in place of `x / jnp.abs(x)`.",
    "x / norm": "A vector of length zero has no direction. Divide by "
    "`jnp.sqrt(jnp.sum(x**2) + eps)`.",
}


def cure_of(kind: str, primitive: str, formula: str, *, is_value: bool) -> str:
    """What to do at an operation of the loss.

    - `formula`: what it is a part of, if that is known; see `formulas.py`.
    """
    cures = {**_OF_KINDS, **_OF_VALUES} if is_value else _OF_KINDS
    text = cures[kind] if kind in cures else _of_constant(kind)
    if kind in (SINGULARITY, INDETERMINATE, OVERFLOW, ZERO_TIMES_INFINITY):
        at_pole = kind in (SINGULARITY, INDETERMINATE)
        text = _OF_PRIMITIVES.get(primitive, text) if at_pole else text
        text = _OF_FORMULAS.get(formula, text)
    return text.format(op=primitive)


def _of_constant(kind: str) -> str:
    what = "NaN" if kind == INPUT else "infinity"
    return f"A constant of the loss holds the {what}. Replace it before it is used."


def cure_of_input(kind: str, name: str, leaf: str) -> str:
    """What to do about an input of the loss that is not finite.

    - `leaf`: its path in the model, if it is one of the parameters.
    """
    what = "NaN" if kind == INPUT else "infinity"
    if leaf:
        return (
            f"The parameter `{leaf}` holds the {what} itself. Look at the update that made it, "
            "with the parameters from before."
        )
    return (
        f"`{name}` holds the {what}. Replace it there before it is used. A `where` on the "
        "result is too late."
    )
