"""What to do about each kind: one table of sentences."""

from collections.abc import Sequence

from ..._jaxprs.primitives import ELEMENTWISE
from .kinds import Kind


_CLIP_GRADIENT = (
    "Use `x = eqg.clip_gradient_norm(x, max_norm)` or `x = eqg.clip_gradient(x, min, max)`, "
    "where `x` is the operand of this operation, or, in a loop, the carry at the start of the "
    "step."
)

# For each kind, of a cotangent. `{op}` is the operation, and `{mask}` what drops the element.
_OF_KINDS = {
    Kind.DEAD_BRANCH: "Use {safe}`eqg.safe.where(ok, f, x, other)`, with this operation in "
    "`f`, instead of `jnp.where(ok, f(x), other)`.",
    Kind.MASKED_PRODUCT: "Use `eqg.safe.where(ok, f, x, 0.0)`, with this operation in `f` and "
    "the mask as `ok`. A `where` further on, instead of the product, is too late: zero times "
    "an infinite derivative is NaN.",
    Kind.ZERO_TIMES_INFINITY: "The derivative of `{op}` is infinite there, and no selection "
    "makes the cotangent zero: one of its factors is zero, or its terms cancel. {use}",
    Kind.SINGULARITY: "The derivative of `{op}` is infinite there. {use}",
    Kind.INDETERMINATE: "The derivative of `{op}` is not defined there. {use}",
    Kind.DIFFERENCE: "In `{op}`, an infinity is subtracted from an infinity, which is NaN. "
    "Replace them before it, with finite numbers.",
    Kind.QUOTIENT: "In `{op}`, an infinity is divided by an infinity, which is NaN. Replace "
    "them before it, with finite numbers.",
    Kind.DOMAIN: "The value of `{op}` is finite there, and its derivative is NaN. Use "
    "`eqg.safe.where(ok, f, x, other)`, with `{op}` in `f`, its value as `other`, and an `ok` "
    "that is false there.",
    Kind.OVERFLOW: "The cotangent that arrives is finite, and its product with the derivative "
    "of `{op}` is too large: the gradient explodes. `eqg.explain_nan(loss, ..., "
    f"threshold=1e6)` says where it begins to grow. {_CLIP_GRADIENT}",
    Kind.INFINITE_CONSTANT: "A `jnp.where` selects a constant infinity, and it reaches "
    "the loss. Mask what is computed from it once more, `jnp.where(mask, y, 0.0)`, or use a "
    "large finite number: `jnp.finfo(x.dtype).min`.",
    Kind.LARGE: _CLIP_GRADIENT,
}

# The same, of a value.
_OF_VALUES = {
    Kind.DOMAIN: "Clip the argument of `{op}` to its domain before the call.",
    Kind.ZERO_TIMES_INFINITY: "Zero times infinity is NaN. Replace the factor that is infinite "
    "before the product: `jnp.where(mask, y, 0.0)`. A `where` on the product is too late for "
    "the gradient.",
    Kind.SINGULARITY: "`{op}` is not finite there. {use}",
    Kind.INDETERMINATE: "`{op}` is not defined there. Keep its arguments away from that point "
    "with a `where` around the arguments.",
    Kind.OVERFLOW: "The result of `{op}` is too large for its dtype. Keep its arguments in "
    "range: scale them down, or add logarithms; in a loop, bound the state at each step "
    "(`jnp.clip`, `jnp.tanh`, or a normalization).",
}

# What does not select an element, if it is no `where`.
_OF_SELECTION = (
    "Use {safe}`eqg.safe.where(ok, f, x, other)` inside of the `{mask}`, with this operation "
    "in `f`, and a constant `other` that the `{mask}` does not take."
)
_OF_LIMIT = (
    "Use {safe}`eqg.safe.where(ok, f, x, other)` instead of the `{mask}`, with this operation "
    "in `f`, and the result at its limit as `other`."
)
_NOT_ELEMENTWISE = (
    "Use {safe}`jnp.where(ok, x, other)` on the operand of `{op}`, with numbers `other` at "
    "which its derivative is finite, instead of the numbers that are not used."
)

# Operations and functions with a replacement that is finite there, and what it is.
_ZERO_THERE = "whose derivative is zero there"
_EMPTY_ROW = "which is `-inf` for a row of `-inf`, with derivative zero"
_SAFE = {
    "sqrt": ("sqrt(x)", _ZERO_THERE),
    "pow": ("power(x, y)", _ZERO_THERE),
    "acos": ("arccos(x)", _ZERO_THERE),
    "asin": ("arcsin(x)", _ZERO_THERE),
    "atan2": ("arctan2(y, x)", _ZERO_THERE),
    "xlogy": ("xlogy(x, y)", _ZERO_THERE),
    "xlog1py": ("xlog1py(x, y)", _ZERO_THERE),
    "logaddexp": ("logaddexp(x, y)", _ZERO_THERE),
    "cumlogsumexp": ("cumlogsumexp(x)", _ZERO_THERE),
    "log": ("log(x)", f"if the value `-inf` does no harm, {_ZERO_THERE}"),
    "div": ("divide(x, y)", _ZERO_THERE),
    "eigh": ("eigh(a)", "which is right for functions that don't depend on the choice of them"),
    "svd": ("svd(a)", "which is right for functions that don't depend on the choice of them"),
    "norm": ("norm(x)", f"{_ZERO_THERE}, and whose squares stay in range"),
    "hypot": ("hypot(x, y)", f"{_ZERO_THERE}, and whose squares stay in range"),
    "std": ("std(x)", _ZERO_THERE),
    "logsumexp": ("logsumexp(x)", _EMPTY_ROW),
    "softmax": ("softmax(x)", "which is zero for a row of `-inf`"),
    "log_softmax": (
        "log_softmax(x)",
        "which is `-inf` for a row of `-inf`, with derivative zero",
    ),
}
# The kinds that these replacements are for. The sentences of the first say what to use.
_POINTS = (Kind.SINGULARITY, Kind.INDETERMINATE, Kind.ZERO_TIMES_INFINITY)
_AT_A_POINT = (
    *_POINTS,
    Kind.DIFFERENCE,
    Kind.DEAD_BRANCH,
    Kind.MASKED_PRODUCT,
)

# Other sentences for an operation at its singular point.
_SINGULAR = "The matrix of `{op}` is singular there. Keep it regular: `a + eps * jnp.eye(n)`."
_AT_ENDS = "`{op}` is infinite at the ends of its domain. Clip its argument: `jnp.clip(x, %s)`."
_XLOG = (
    "`{op}(x, y)` is infinite where `x` is not zero and `y` is at the end of its domain. Keep "
    "`y` inside of it (for a `logpdf`, the data)."
)
_OF_VALUES_OF_OPERATIONS = {
    **dict.fromkeys(("atanh", "erf_inv"), _AT_ENDS % "-1 + eps, 1 - eps"),
    "logit": _AT_ENDS % "eps, 1 - eps",
    **dict.fromkeys(("xlogy", "xlog1py"), _XLOG),
    "div": "The divisor is zero. Keep it away from zero (`y + eps`; for a count, "
    "`jnp.maximum(n, 1)`), or use `jnp.where(y == 0, 0.0, eqg.safe.divide(x, y))`.",
    "log": "Keep the argument of `log` away from zero: `jnp.log(x + eps)`, with an `eps` of at "
    "least `jnp.finfo(x.dtype).tiny`. If it is a softmax or a sigmoid, use "
    "`jax.nn.log_softmax` or `jax.nn.log_sigmoid`; for `x * log(y)`, `eqg.safe.xlogy(x, y)`.",
}
_OF_OPERATIONS = {
    **dict.fromkeys(
        ("custom_linear_solve", "triangular_solve", "tridiagonal_solve", "lu", "slogdet"),
        _SINGULAR,
    ),
    "cholesky": "The matrix is not positive definite there. Symmetrize it, and add a multiple "
    "of the identity: `a + eps * jnp.eye(n)`.",
    "rsqrt": "`rsqrt` is infinite at zero. Add a small number to its argument: "
    "`jax.lax.rsqrt(x + eps)`. In a normalization layer, this is the argument `eps`.",
}

# What overflows of an exponential, and where to clip the argument of others.
_OF_EXPONENTIALS = (
    "Keep the argument of `{op}` in range: subtract the maximum, or call the function that "
    "does, such as `jax.nn.softmax`, `jax.nn.logsumexp`, `jax.nn.softplus` or "
    "`jax.nn.sigmoid`."
)
_EXPONENTIALS = ("exp", "exp2", "expm1", "cosh", "sinh")
_DOMAINS = {
    **dict.fromkeys(("acos", "asin"), "jnp.clip(x, -1, 1)"),
    **dict.fromkeys(("sqrt", "pow"), "jnp.maximum(x, 0)"),
    "log": "jnp.maximum(x, eps)",
}

_IN_A_RULE = (
    "The rule of `{op}` is %s there. If the derivative has a limit, compute it in the rule, "
    "with a `jnp.where` on the arguments of the quotient, root or logarithm. If it has none, "
    "keep the argument of `{op}` away from that point (`x + eps`)."
)
_OF_RULES = {
    Kind.SINGULARITY: _IN_A_RULE % "infinite",
    Kind.INDETERMINATE: _IN_A_RULE % "not defined",
}
_AT_A_CORNER = (
    "`{op}` has a kink or a pole there: its first derivative is a convention, and its second "
    "one does not exist. If a mask drops the element, mask the argument as well: "
    "`eqg.safe.where(ok, f, x, other)`, with `{op}` in `f`. If what is computed from it is "
    "smooth there, as `norm(x)**2` is, compute it without: `jnp.sum(x**2)`. The docs have "
    "kernels of a distance, in `recipes/nan-and-zero`."
)
_NO_SECOND = (
    " Its second derivative is NaN there. If what the loss computes from it is smooth there, "
    "as `norm(x)**2` is, compute it without (`jnp.sum(x**2)`), or write a rule for it."
)
_IN_A_DERIVATIVE = (
    " It is in a derivative that the loss takes. If a `where` drops the operation there, use "
    '`eqg.zero_safe(f, policy="zero")` instead of the function `f` that is differentiated.'
)
_HOST_VALUE = "The host function returns this. Keep its arguments in its domain."
_HOST_DERIVATIVE = (
    "The derivative of the host function is not finite there. Finite differences evaluate it "
    "within a `step` of its argument, and may leave its domain: give a smaller `step`, with "
    "code that computes in float64, or a rule (`eqg.elementwise`, `def_bwd`, `def_jvp`)."
)


def cure_of(
    kind: Kind,
    op: str,
    helps: str,
    *,
    is_value: bool,
    mask: str = "",
    calls: Sequence[str] = (),
    holder: str = "",
    leaf: str = "",
    is_rule: bool = False,
    is_nan_operand: bool = False,
    operands: Sequence[float] = (),
    is_of_meant: bool = False,
    is_in_derivative: bool = False,
    corner: str = "",
) -> str:
    """What to do.

    - `helps`: the call of `zero_safe` that was tried, and makes the gradient finite.
    - `mask`: what makes the cotangent zero. `calls`: the functions of JAX that it is in.
    - `holder`: the input that is not finite, and `leaf`: its path in the model.
    - `is_of_meant`: an infinity of the data or of a constant makes it.
    """
    dropped = kind in (Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT)
    if kind in (Kind.INPUT, Kind.INFINITE_INPUT) or (is_nan_operand and dropped):
        return _of_input(kind, holder, leaf)
    if is_of_meant and kind == Kind.ZERO_TIMES_INFINITY and not is_value and op not in _SAFE:
        return _of_infinite_operand(holder, op)
    if corner:
        return _AT_A_CORNER.format(op=corner)
    text = _of_operation(kind, op, is_value, mask, calls, is_rule)
    is_general = not text
    text = text or (_OF_VALUES.get(kind) if is_value else None) or _OF_KINDS[kind]
    safe = next((_SAFE[name] for name in (*calls, op) if name in _SAFE), None)
    is_nan_too = op == "div" and (is_value or not any(operands))  # the value of `safe.divide`
    has_safe = safe is not None and kind in _AT_A_POINT and not is_rule and not is_nan_too
    away = "eep its argument away from that point (`x + eps`)."
    replacement = f"`eqg.safe.{safe[0]}`, {safe[1]}" if safe is not None else ""
    use = f"Use {replacement}, or k{away}" if has_safe else f"K{away}"
    if op == "div" and kind == Kind.DEAD_BRANCH and is_nan_too:
        text += " Or replace the divisor before it, `x / jnp.where(y == 0, 1.0, y)`."
    elif op == "div" and kind == Kind.OVERFLOW and not is_value:
        text += " Or use `eqg.safe.divide(x, y)`, whose derivative needs no `y**-2`."
    elif has_safe and not (is_general and kind in _POINTS):
        text += f" Or use {replacement}."
    if helps and not is_value and kind in DROPPABLE and kind != Kind.DEAD_BRANCH:
        text += f" In code that you can't edit, use {helps}."
    if is_in_derivative:
        text += _NO_SECOND * has_safe + _IN_A_DERIVATIVE * (kind in DROPPABLE)
    return text.format(op=op, mask=mask, safe=f"{helps}, or " if helps else "", use=use)


def _of_operation(kind, op, is_value, mask, calls, is_rule) -> str:
    """What is special to an operation, or an empty string."""
    text = ""
    if op == "pure_callback" or op == "host_call":
        text = _HOST_VALUE if is_value else _HOST_DERIVATIVE
    elif is_rule:
        text = _OF_RULES.get(kind, "")
    elif kind == Kind.DEAD_BRANCH:
        text = _of_dead_branch(op, mask)
    elif kind == Kind.OVERFLOW and is_value and op in _EXPONENTIALS:
        text = _OF_EXPONENTIALS
    elif kind == Kind.DOMAIN and is_value and op in _DOMAINS:
        safe = f" At its ends, use `eqg.safe.{_SAFE[op][0]}`, {_ZERO_THERE}." * (op != "log")
        text = f"Clip the argument of `{op}` to its domain: `{_DOMAINS[op]}`.{safe}"
    if not text and kind in (Kind.SINGULARITY, Kind.INDETERMINATE, Kind.DOMAIN):
        names = [*calls, op]
        tables = [_OF_OPERATIONS]
        if is_value and kind != Kind.DOMAIN:
            tables.insert(0, _OF_VALUES_OF_OPERATIONS)
        return next((t[name] for t in tables for name in names if name in t), "")
    return text


# What `zero_safe` may help with, which is tried.
DROPPABLE = (
    Kind.DEAD_BRANCH,
    Kind.MASKED_PRODUCT,
    Kind.ZERO_TIMES_INFINITY,
    Kind.SINGULARITY,
    Kind.INDETERMINATE,
)


def _of_dead_branch(op: str, mask: str) -> str:
    if op not in ELEMENTWISE:
        return _NOT_ELEMENTWISE
    if mask in ("maximum", "minimum", "clip"):
        return _OF_LIMIT
    return "" if mask in ("", "where") else _OF_SELECTION


def _of_input(kind: Kind, holder: str, leaf: str) -> str:
    what = "infinity" if kind == Kind.INFINITE_INPUT else "NaN"
    if leaf:
        whose = "model" if leaf == "model" else f"parameter `{leaf}`"
        return (
            f"The {whose} holds the {what} itself. Look at the initialization, or at the "
            "update that made it, with the parameters from before."
        )
    if not holder:
        return f"A constant of the loss holds the {what}. Replace it before it is used."
    array = holder if holder.isidentifier() else "x"
    article = "an" if what == "infinity" else "a"
    return (
        f"`{holder}` holds {article} {what}. Replace it before it is used, with `ok = "
        f"jnp.isfinite({array})` and `jnp.where(ok, {array}, 0.0)`. A `where` on the result is "
        "too late."
    )


def _of_infinite_operand(holder: str, op: str) -> str:
    what = f"`{holder}` holds an infinity" if holder else f"An operand of `{op}` is infinite"
    array = holder if holder.isidentifier() else "x"
    return (
        f"{what}, and its product with a cotangent that is zero is NaN. Use "
        f"`eqg.safe.where(jnp.isfinite({array}), f, {array}, limit)`, with all in `f` that is "
        "computed from it until the result is finite."
    )
