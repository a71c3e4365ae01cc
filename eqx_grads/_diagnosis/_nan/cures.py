"""The advice for each kind: one table of sentences."""

from collections.abc import Sequence

from ..._jaxprs.primitives import ELEMENTWISE
from .causes import Kind


_SAFE_WHERE = "Use `eqg.safe.where(ok, f, x, other)`, with this operation in `f`"
_AWAY = "Keep the argument of `{op}` away from that point: `x + eps`, or a layer's `eps`."
_INFINITIES = "`{op}` makes NaN of infinities. Replace them before it, with finite numbers."
_MASK = "Mask what is computed from it once more: `jnp.where(mask, y, 0.0)`."
_CLIP_GRADIENT = (
    "Use `x = eqg.clip_gradient_norm(x, max_norm)` on the operand of this operation, or, in a "
    "loop, on the carry at the start of the step."
)

# What to do about each kind, for a cotangent. `{op}` is the operation, and `{mask}` what drops
# the element.
_OF_KINDS = {
    Kind.DEAD_BRANCH: f"{_SAFE_WHERE}, and `ok` where the `{{mask}}` selects it.",
    Kind.MASKED_PRODUCT: f"{_SAFE_WHERE}, and the mask as `ok`.",
    Kind.ZERO_TIMES_INFINITY: f"{_SAFE_WHERE}.",
    Kind.SINGULARITY: _AWAY,
    Kind.INDETERMINATE: _AWAY,
    Kind.DIFFERENCE: _INFINITIES,
    Kind.QUOTIENT: _INFINITIES,
    Kind.DOMAIN: f"{_SAFE_WHERE}, and its value as `other`: only its derivative is NaN.",
    Kind.OVERFLOW: _CLIP_GRADIENT,
    Kind.INFINITE_CONSTANT: _MASK,
    Kind.LARGE: _CLIP_GRADIENT,
}
# The same, for a value.
_OF_VALUES = {
    Kind.DOMAIN: "Clip the argument of `{op}` to its domain before the call{domain}.",
    Kind.ZERO_TIMES_INFINITY: "Replace the factor that is infinite before the product: "
    "`jnp.where(mask, y, 0.0)`.",
    Kind.OVERFLOW: "The result of `{op}` is too large for its dtype. Scale its arguments down; "
    "in a loop, bound the state at each step, as by `jnp.tanh(x)`.",
}
_DOMAINS = {
    **dict.fromkeys(("acos", "asin"), ": `jnp.clip(x, -1, 1)`"),
    **dict.fromkeys(("sqrt", "pow"), ": `jnp.maximum(x, 0)`"),
    "log": ": `jnp.maximum(x, eps)`",
}

# Operations and functions with a replacement whose derivative is zero, or defined, there.
_CALLS = "sqrt(x) log(x) eigh(a) svd(a) norm(x) hypot(x,y) std(x) logsumexp(x) softmax(x)"
_CALLS += " log_softmax(x) cumlogsumexp(x) logaddexp(x,y) xlogy(x,y) xlog1py(x,y)"
_SAFE = {
    **{call.partition("(")[0]: call.replace(",", ", ") for call in _CALLS.split()},
    "pow": "power(x, y)",
    "acos": "arccos(x)",
    "asin": "arcsin(x)",
    "atan2": "arctan2(y, x)",
}
# The kinds that these replacements are for.
_POINTS = (Kind.SINGULARITY, Kind.INDETERMINATE, Kind.ZERO_TIMES_INFINITY, Kind.DIFFERENCE)
# The kinds that `zero_safe` may help with, which is tried.
DROPPABLE = (*_POINTS[:3], Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT)

# Other sentences for an operation that is not defined, or whose derivative is not, there.
_MATRICES = {"custom_linear_solve", "triangular_solve", "tridiagonal_solve"}
_MATRICES |= {"lu", "slogdet", "cholesky"}
_OF_MATRICES = (
    "The matrix of `{op}` is singular, or not positive definite, there. Use "
    "`a + eps * jnp.eye(n)`."
)
_OF_VALUES_OF_OPERATIONS = {
    "div": "The divisor is zero. Add a small number, or, for a count, use `jnp.maximum(n, 1)`.",
    "log": "Use `jnp.log(x + eps)`. For a softmax or a sigmoid, use `jax.nn.log_softmax` or "
    "`jax.nn.log_sigmoid`; for `x * log(y)`, `eqg.safe.xlogy(x, y)`.",
}
_OF_ROWS = (
    "Use `jnp.where(ok, x, other)` on the operand of `{op}`, with numbers `other` at which its "
    "derivative is finite."
)
_OF_INDICES = (
    "An index is out of range there, and JAX fills in NaN. Use an index in range, as of "
    '`jnp.take(x, i, axis=0, mode="clip")`.'
)
_OF_SCATTERS = (
    "JAX's derivative of `{op}` needs indices in range: pass `jnp.clip(i, 0, n - 1)`."
)
_OF_LEAST_SQUARES = "Use `jnp.linalg.pinv(a) @ b`: equal singular values do not matter to it."
_EXPONENTIALS = ("exp", "exp2", "expm1", "cosh", "sinh")
_OF_EXPONENTIALS = (
    "Subtract the maximum from the argument of `{op}`, or call the function that does, such as "
    "`jax.nn.softmax`, `jax.nn.logsumexp` or `jax.nn.softplus`."
)
_OF_DIVISORS = "Use `eqg.safe.divide(x, y)`, whose derivative needs no `y**-2`."
_OF_RULES = (
    "The rule of `{op}` is not finite there. If the derivative has a limit, compute it in the "
    "rule, with a `jnp.where` on the arguments."
)
_OF_DERIVATIVES = (
    " It is in a derivative that the loss takes. If a `where` drops it there, differentiate "
    '`eqg.zero_safe(f, policy="zero")` instead of `f`.'
)
_IF_SMOOTH = (
    " If what is computed from it is smooth there, compute it without, as `jnp.sum(x**2)`."
)
_OF_PARAMETERS = "The {whose} holds the {what} itself. Look at the update that made it."
_OF_CONSTANTS = "A constant of the loss holds the {what}. Replace it before it is used."
_OF_DATA = (
    "`{holder}` holds the {what}. Replace it before it is used, with `ok = jnp.isfinite({x})` "
    "and `jnp.where(ok, {x}, 0.0)`."
)


def cure_of(
    kind: Kind,
    op: str,
    helps: str,
    *,
    is_value: bool,
    mask: str = "",
    calls: Sequence[str] = (),
    is_rule: bool = False,
    is_in_derivative: bool = False,
) -> str:
    """The advice.

    - `helps`: the call of `zero_safe` that was tried, and makes the gradient finite.
    - `mask`: what makes the cotangent zero. `calls`: the functions of JAX that it is in.
    """
    called = next((name for name in (*calls, op) if name in _SAFE), "")
    # A `where` around a function of several elements would drop all of them.
    is_whole = bool(called) and (called != op or op not in ELEMENTWISE)
    has_safe = kind in _POINTS or (is_whole and kind in DROPPABLE)
    of_safe = f"Use `eqg.safe.{_SAFE.get(called)}`, whose first derivative is defined there."
    is_dead, is_masked = kind == Kind.DEAD_BRANCH, kind == Kind.MASKED_PRODUCT
    is_overflow, is_point = kind == Kind.OVERFLOW, kind in _POINTS[:2]
    of_matrices = not _MATRICES.isdisjoint((*calls, op))
    # The first text whose condition holds.
    texts = (
        ("lstsq" in calls and kind in _POINTS, _OF_LEAST_SQUARES),
        (is_whole and has_safe, of_safe),
        (op in ("scatter-min", "scatter-max") and is_point, _OF_SCATTERS),
        (op == "gather" and (is_dead or is_masked or kind == Kind.DOMAIN), _OF_INDICES),
        (is_dead and op not in ELEMENTWISE and not is_rule, _OF_ROWS),
        (is_overflow and is_value and op in _EXPONENTIALS, _OF_EXPONENTIALS),
        (is_overflow and op == "div" and not is_value, _OF_DIVISORS),
        (is_rule and (kind in _POINTS or is_masked), _OF_RULES),
        (of_matrices and (is_point or kind == Kind.DOMAIN), _OF_MATRICES),
        (is_value and is_point, _OF_VALUES_OF_OPERATIONS.get(op)),
        (bool(called) and has_safe, of_safe),
        (is_value, _OF_VALUES.get(kind)),
        (True, _OF_KINDS[kind]),
    )
    text = next(text for holds, text in texts if holds and text)
    if helps and kind in DROPPABLE:
        text += f" In code that you can't edit, use {helps}."
    if is_in_derivative and (kind in DROPPABLE or op.startswith("safe.")):
        text += _OF_DERIVATIVES
    # There, `safe` and `policy="zero"` give zero, as for `cos(sqrt(x))`.
    text += _IF_SMOOTH * (_OF_DERIVATIVES in text or kind == Kind.ZERO_TIMES_INFINITY)
    return text.format(op=op, mask=mask or "where", domain=_DOMAINS.get(op, ""))


def cure_of_input(kind: Kind, holder: str, leaf: str, helps: str) -> str:
    """The advice on an input that is not finite. `leaf`: its path in the model. `helps`: as for
    `cure_of`."""
    drop = f" If the loss drops it on purpose, use {helps}." if helps else ""
    what = "infinity" if kind == Kind.INFINITE_INPUT else "NaN"
    if leaf:
        whose = "model" if leaf == "model" else f"parameter `{leaf}`"
        return _OF_PARAMETERS.format(whose=whose, what=what) + drop
    x = holder if holder.isidentifier() else "x"
    text = _OF_DATA if holder else _OF_CONSTANTS
    return text.format(holder=holder, what=what, x=x) + drop
