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
    '`eqg.zero_safe(f, policy="zero")` instead of `f`. If what is computed from it is smooth '
    "there, compute it without, as `jnp.sum(x**2)`."
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
    text = _of_operation(kind, op, is_value, calls, is_rule)
    named = next((name for name in (*calls, op) if name in _SAFE), op)
    # A `where` around a function of several elements would drop all of them.
    kinds = _POINTS if named == op else (*_POINTS, *DROPPABLE)
    if named in _SAFE and kind in kinds and (named != op or not text):
        text = f"Use `eqg.safe.{_SAFE[named]}`, whose first derivative is defined there."
    text = text or (_OF_VALUES.get(kind) if is_value else "") or _OF_KINDS[kind]
    if helps and kind in DROPPABLE:
        text += f" In code that you can't edit, use {helps}."
    if is_in_derivative and (kind in DROPPABLE or op.startswith("safe.")):
        text += _OF_DERIVATIVES
    return text.format(op=op, mask=mask or "where", domain=_DOMAINS.get(op, ""))


def _of_operation(kind, op, is_value, calls, is_rule) -> str:
    """Advice that is special to an operation, or an empty string."""
    if op == "gather" and kind in (Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT, Kind.DOMAIN):
        return _OF_INDICES
    if kind == Kind.DEAD_BRANCH:
        return "" if op in ELEMENTWISE or is_rule else _OF_ROWS
    if kind == Kind.OVERFLOW and is_value and op in ("exp", "exp2", "expm1", "cosh", "sinh"):
        return _OF_EXPONENTIALS
    if kind == Kind.OVERFLOW and op == "div" and not is_value:
        return _OF_DIVISORS
    if is_rule and kind in (*_POINTS, Kind.MASKED_PRODUCT):
        return _OF_RULES
    if kind not in (Kind.SINGULARITY, Kind.INDETERMINATE, Kind.DOMAIN):
        return ""
    if not _MATRICES.isdisjoint((*calls, op)):
        return _OF_MATRICES
    is_point = is_value and kind != Kind.DOMAIN
    return _OF_VALUES_OF_OPERATIONS.get(op, "") if is_point else ""


def cure_of_input(kind: Kind, holder: str, leaf: str) -> str:
    """The advice on an input that is not finite. `leaf`: its path in the model."""
    what = "infinity" if kind == Kind.INFINITE_INPUT else "NaN"
    if leaf:
        whose = "model" if leaf == "model" else f"parameter `{leaf}`"
        return _OF_PARAMETERS.format(whose=whose, what=what)
    x = holder if holder.isidentifier() else "x"
    return (_OF_DATA if holder else _OF_CONSTANTS).format(holder=holder, what=what, x=x)
