"""What to do about each kind: one table of sentences."""

from collections.abc import Sequence

from ..._jaxprs.primitives import ELEMENTWISE
from .kinds import Kind


_CLIP_GRADIENT = (
    "Use `x = eqg.clip_gradient_norm(x, max_norm)` on the operand of this operation, or, in a "
    "loop, on the carry at the start of the step."
)
_INFINITIES = "`{op}` makes NaN of infinities. Replace them before it, with finite numbers."

# For each kind, of a cotangent. `{op}` is the operation, and `{mask}` what drops the element.
_OF_KINDS = {
    Kind.DEAD_BRANCH: "Use {safe}`eqg.safe.where(ok, f, x, other)`, with this operation in "
    "`f`, instead of `jnp.where(ok, f(x), other)`.",
    Kind.MASKED_PRODUCT: "Use `eqg.safe.where(ok, f, x, 0.0)`, with this operation in `f` and "
    "the mask as `ok`.",
    Kind.ZERO_TIMES_INFINITY: "The derivative of `{op}` is infinite there, and no selection "
    "makes the cotangent zero. {use}",
    Kind.SINGULARITY: "The derivative of `{op}` is infinite there. {use}",
    Kind.INDETERMINATE: "The derivative of `{op}` is not defined there. {use}",
    Kind.DIFFERENCE: _INFINITIES,
    Kind.QUOTIENT: _INFINITIES,
    Kind.DOMAIN: "The value of `{op}` is finite there, and its derivative is NaN. Use "
    "`eqg.safe.where(ok, f, x, other)`, with `{op}` in `f`, and its value as `other`.",
    Kind.OVERFLOW: "The gradient explodes: its product with the derivative of `{op}` is too "
    f"large. {_CLIP_GRADIENT}",
    Kind.INFINITE_CONSTANT: "A `jnp.where` selects a constant infinity, and it reaches the "
    "loss. Mask what is computed from it once more: `jnp.where(mask, y, 0.0)`.",
    Kind.LARGE: _CLIP_GRADIENT,
}

# The same, of a value.
_OF_VALUES = {
    Kind.DOMAIN: "Clip the argument of `{op}` to its domain before the call{domain}.",
    Kind.ZERO_TIMES_INFINITY: "Replace the factor that is infinite before the product: "
    "`jnp.where(mask, y, 0.0)`.",
    Kind.SINGULARITY: "`{op}` is not finite there. {use}",
    Kind.INDETERMINATE: "`{op}` is not defined there. Keep its arguments away from that point "
    "with a `where` around the arguments.",
    Kind.OVERFLOW: "The result of `{op}` is too large for its dtype. Scale its arguments down; "
    "in a loop, bound the state at each step, as by `jnp.tanh(x)`.",
}
_DOMAINS = {
    **dict.fromkeys(("acos", "asin"), ": `jnp.clip(x, -1, 1)`"),
    **dict.fromkeys(("sqrt", "pow"), ": `jnp.maximum(x, 0)`"),
    "log": ": `jnp.maximum(x, eps)`",
}
_EXPONENTIALS = ("exp", "exp2", "expm1", "cosh", "sinh")
_OF_EXPONENTIALS = (
    "Subtract the maximum from the argument of `{op}`, or call the function that does, such as "
    "`jax.nn.softmax`, `jax.nn.logsumexp` or `jax.nn.softplus`."
)

# For a dead branch, by what does not select the element, if it is no `where`.
_OF_SELECTION = (
    "Use {safe}`eqg.safe.where(ok, f, x, other)` inside of the `{mask}`, with this operation "
    "in `f`, and a constant `other` that the `{mask}` does not take."
)
_OF_LIMIT = (
    "Use {safe}`eqg.safe.where(ok, f, x, other)` instead of the `{mask}`, with this operation "
    "in `f`, and the result at its limit as `other`."
)
_OF_ROWS = (
    "Use {safe}`jnp.where(ok, x, other)` on the operand of `{op}`, with numbers `other` at "
    "which its derivative is finite."
)

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
# The kinds that these replacements are for. The sentences of the first say what to use.
_POINTS = (Kind.SINGULARITY, Kind.INDETERMINATE, Kind.ZERO_TIMES_INFINITY)
# What `zero_safe` may help with, which is tried.
DROPPABLE = (*_POINTS, Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT)
_AT_A_POINT = (*DROPPABLE, Kind.DIFFERENCE, Kind.DOMAIN)

# Other sentences for an operation at a singular point, and for its value there.
_SOLVES = ("custom_linear_solve", "triangular_solve", "tridiagonal_solve", "lu", "slogdet")
_OF_OPERATIONS = {
    **dict.fromkeys(
        _SOLVES, "The matrix of `{op}` is singular there. Use `a + eps * jnp.eye(n)`."
    ),
    "cholesky": "The matrix is not positive definite there. Symmetrize it, and use "
    "`a + eps * jnp.eye(n)`.",
    "rsqrt": "`rsqrt` is infinite at zero. Use `jax.lax.rsqrt(x + eps)`. In a normalization "
    "layer, this is the argument `eps`.",
}
_ENDS = "`{op}` is infinite at the ends of its domain. Clip its argument: `jnp.clip(x, %s)`."
_XLOG = "`{op}(x, y)` is infinite there. Keep `y` (for a `logpdf`, the data) in its domain."
_OF_VALUES_OF_OPERATIONS = {
    **dict.fromkeys(("atanh", "erf_inv"), _ENDS % "-1 + eps, 1 - eps"),
    "logit": _ENDS % "eps, 1 - eps",
    **dict.fromkeys(("xlogy", "xlog1py"), _XLOG),
    "div": "The divisor is zero. Add a small number, or, for a count, use `jnp.maximum(n, 1)`.",
    "log": "Use `jnp.log(x + eps)`. For a softmax or a sigmoid, use `jax.nn.log_softmax` or "
    "`jax.nn.log_sigmoid`; for `x * log(y)`, `eqg.safe.xlogy(x, y)`.",
}

_OF_RULES = (
    "The rule of `{op}` is {how} there. If the derivative has a limit, compute it in the rule, "
    "with a `jnp.where` on the arguments. If not, keep the argument away from that point."
)
_OF_CORNERS = (
    "`{op}` has a kink or a pole there: its second derivative does not exist. If a mask drops "
    "the element, use `eqg.safe.where(ok, f, x, other)`, with `{op}` in `f`. If what is "
    "computed from it is smooth there, compute it without, as `jnp.sum(x**2)`. The docs have "
    "kernels of a distance, in recipes/nan-and-zero."
)
_OF_DERIVATIVES = (
    " It is in a derivative that the loss takes. If a `where` drops the operation there, use "
    '`eqg.zero_safe(f, policy="zero")` instead of the function `f` that is differentiated.'
)
_OF_SECOND_DERIVATIVES = (
    " Its second derivative is NaN there. If what the loss computes from it is smooth there, "
    "compute it without, as `jnp.sum(x**2)`."
)
_OF_HOST_VALUES = "The host function returns this. Keep its arguments in its domain."
_OF_HOST_DERIVATIVES = (
    "Finite differences evaluate the host function within a `step` of its argument, and may "
    "leave its domain. Give a smaller `step`, with code that computes in float64, or a rule."
)
_OF_PARAMETERS = "The {whose} holds the {what} itself. Look at the update that made it."
_OF_CONSTANTS = "A constant of the loss holds the {what}. Replace it before it is used."
_OF_DATA = (
    "`{holder}` holds {a} {what}. Replace it before it is used, with `ok = jnp.isfinite({x})` "
    "and `jnp.where(ok, {x}, 0.0)`."
)
_OF_INFINITE_DATA = (
    "{what}, and its product with a cotangent that is zero is NaN. Use "
    "`eqg.safe.where(jnp.isfinite({x}), f, {x}, limit)`, with all in `f` that is computed from "
    "it until the result is finite."
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
    is_of_meant: bool = False,
    is_in_derivative: bool = False,
    corner: str = "",
) -> str:
    """What to do.

    - `helps`: the call of `zero_safe` that was tried, and makes the gradient finite.
    - `mask`: what makes the cotangent zero. `calls`: the functions of JAX that it is in.
    - `holder`: the input that is not finite, and `leaf`: its path in the model.
    - `is_of_meant`: an infinity of the data or of a constant makes it.
    - `corner`: the function of `eqx_grads.safe` that has no second derivative there.
    """
    is_dead = kind == Kind.DEAD_BRANCH
    if kind in (Kind.INPUT, Kind.INFINITE_INPUT) or (
        is_nan_operand and kind in (Kind.DEAD_BRANCH, Kind.MASKED_PRODUCT)
    ):
        return _of_input(kind, holder, leaf)
    if corner:
        return _OF_CORNERS.format(op=corner)
    if is_of_meant and kind == Kind.ZERO_TIMES_INFINITY and not is_value and op not in _SAFE:
        what = (
            f"`{holder}` holds an infinity" if holder else f"An operand of `{op}` is infinite"
        )
        return _OF_INFINITE_DATA.format(what=what, x=_name(holder))
    text = _of_operation(kind, op, is_value, mask, calls, is_rule)
    is_general = not text
    text = text or (_OF_VALUES.get(kind) if is_value else None) or _OF_KINDS[kind]
    safe = next((_SAFE[name] for name in (*calls, op) if name in _SAFE), "")
    has_end = kind != Kind.DOMAIN or (op in _DOMAINS and op != "log")
    safe = safe if kind in _AT_A_POINT and has_end and not is_rule else ""
    replacement = f"`eqg.safe.{safe}`, whose derivative is defined there"
    away = "eep its argument away from that point (`x + eps`)."
    use = f"Use {replacement}, or k{away}" if safe else f"K{away}"
    if op == "div" and kind == Kind.OVERFLOW and not is_value:
        text += " Or use `eqg.safe.divide(x, y)`, whose derivative needs no `y**-2`."
    elif op == "div" and is_dead and not helps:
        text += " Or replace the divisor before it, `x / jnp.where(y == 0, 1.0, y)`."
    elif safe and not (is_general and kind in _POINTS) and not (is_dead and helps):
        text += f" {'At its ends,' if kind == Kind.DOMAIN else 'Or'} use {replacement}."
    if helps and not is_value and kind in DROPPABLE and not is_dead:
        text += f" In code that you can't edit, use {helps}."
    if is_in_derivative:
        text += _OF_SECOND_DERIVATIVES * bool(safe) + _OF_DERIVATIVES * (kind in DROPPABLE)
    how = "infinite" if kind == Kind.SINGULARITY else "not defined"
    tried, domain = f"{helps}, or " if helps else "", _DOMAINS.get(op, "")
    return text.format(op=op, mask=mask, safe=tried, use=use, how=how, domain=domain)


def _of_operation(kind, op, is_value, mask, calls, is_rule) -> str:
    """What is special to an operation, or an empty string."""
    if op == "pure_callback" or op == "host_call":
        return _OF_HOST_VALUES if is_value else _OF_HOST_DERIVATIVES
    if kind == Kind.DEAD_BRANCH and not is_rule:
        if op not in ELEMENTWISE:
            return _OF_ROWS
        if mask in ("maximum", "minimum", "clip"):
            return _OF_LIMIT
        return "" if mask in ("", "where") else _OF_SELECTION
    if kind == Kind.OVERFLOW and is_value and op in _EXPONENTIALS:
        return _OF_EXPONENTIALS
    if is_rule and kind in (Kind.SINGULARITY, Kind.INDETERMINATE):
        return _OF_RULES
    if kind not in (Kind.SINGULARITY, Kind.INDETERMINATE, Kind.DOMAIN):
        return ""
    tables = [_OF_OPERATIONS]
    if is_value and kind != Kind.DOMAIN:
        tables.insert(0, _OF_VALUES_OF_OPERATIONS)
    return next((t[name] for t in tables for name in (*calls, op) if name in t), "")


def _name(holder: str) -> str:
    return holder if holder.isidentifier() else "x"


def _of_input(kind: Kind, holder: str, leaf: str) -> str:
    what = "infinity" if kind == Kind.INFINITE_INPUT else "NaN"
    if leaf:
        whose = "model" if leaf == "model" else f"parameter `{leaf}`"
        return _OF_PARAMETERS.format(whose=whose, what=what)
    if not holder:
        return _OF_CONSTANTS.format(what=what)
    a = "an" if what == "infinity" else "a"
    return _OF_DATA.format(holder=holder, a=a, what=what, x=_name(holder))
