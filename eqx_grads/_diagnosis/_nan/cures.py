"""The kinds of `explain_nan`, and what to do about each of them."""

from ..._jaxprs.primitives import ELEMENTWISE


DEAD_BRANCH = "dead branch"
MASKED_PRODUCT = "zero mask"
ZERO_TIMES_INFINITY = "zero times infinity"
SINGULARITY = "true singularity"
INDETERMINATE = "0/0"
DIFFERENCE = "inf - inf"
QUOTIENT = "inf / inf"
DOMAIN = "outside of the domain"
OVERFLOW = "overflow"
LARGE = "exceeds the threshold"
INPUT = "NaN in the input"
INFINITE_INPUT = "inf in the input"
INFINITE_CONSTANT = "constant infinity"

# The argument is at a point at which the operation or its derivative is not defined.
_AT_POINTS = (SINGULARITY, INDETERMINATE, DIFFERENCE, QUOTIENT)

# What an operation computes where it makes a NaN of infinities. Others are not defined there.
OF_INFINITIES = {
    **dict.fromkeys(("add", "add_any", "sub", "reduce_sum", "cumsum"), DIFFERENCE),
    **dict.fromkeys(("mul", "dot_general", "reduce_prod", "cumprod"), ZERO_TIMES_INFINITY),
    "div": QUOTIENT,
}

# Operations that are not finite for a singular matrix.
SOLVES = ("custom_linear_solve", "triangular_solve", "tridiagonal_solve", "lu", "cholesky")
# The functions of JAX that are infinite for one.
LOG_DETERMINANTS = ("_slogdet_small", "_slogdet_lu", "_slogdet_qr")

# The cures of dead branches begin with "Use" and this, which is left out if it does not help.
ZERO_SAFE = "`eqg.zero_safe(loss)`"

# For each kind. `{op}` is the primitive.
_OF_KINDS = {
    DEAD_BRANCH: f"Use {ZERO_SAFE}, or `eqg.safe.where(ok, f, x, other)`, with this "
    "operation in `f`, in place of `jnp.where(ok, f(x), other)`.",
    MASKED_PRODUCT: "Use `eqg.safe.where(ok, f, x, 0.0)`, with this operation in `f` and the "
    "mask as `ok`. A `where` further on, in place of the product, is too late: zero times an "
    "infinite derivative is NaN.",
    ZERO_TIMES_INFINITY: "The derivative of `{op}` is infinite there, and no selection makes "
    "the cotangent zero: a factor of it is zero, its terms cancel, or a product underflows. "
    "Keep the argument of `{op}` away from that point (`x + eps`).",
    SINGULARITY: "The derivative of `{op}` is infinite there. Keep its argument away from that "
    "point (`x + eps`).",
    INDETERMINATE: "The derivative of `{op}` is not defined there. Keep its argument away from "
    "that point (`x + eps`).",
    DIFFERENCE: "In `{op}`, an infinity is subtracted from an infinity, which is NaN. Replace "
    "them before it, with finite numbers.",
    QUOTIENT: "In `{op}`, an infinity is divided by an infinity, which is NaN. Replace them "
    "before it, with finite numbers.",
    DOMAIN: "Clip the argument of `{op}` to its domain before the call.",
    OVERFLOW: "Keep the argument of `{op}` in range: subtract the maximum, or use logarithms.",
    INFINITE_CONSTANT: "A `jnp.where` selects a constant infinity, and it reaches the "
    "loss. Mask what is computed from it once more, before a product with it: "
    "`jnp.where(mask, y, 0.0)`. Or use a large finite number: `jnp.finfo(x.dtype).min`.",
    LARGE: "Use `x = eqg.clip_gradient_norm(x, max_norm)` or `x = eqg.clip_gradient(x, min, "
    "max)`, where `x` is the operand of this operation, or, in a loop, the carry at the start "
    "of the step.",
}

# Of an overflow in the product of a finite cotangent and a finite derivative.
_EXPLODES = (
    "The cotangent that arrives is finite, and its product with the derivative of `{op}` is "
    "too large: the gradient explodes. `eqg.explain_nan(loss, ..., threshold=1e6)` says where "
    f"it begins to grow. {_OF_KINDS[LARGE]}"
)

_HOST_VALUE = "The host function returns this. Keep its arguments in its domain."
_HOST_DERIVATIVE = (
    "The derivative of the host function is not finite there. Finite differences evaluate it "
    "within a `step` of its argument, and may leave its domain: give a smaller `step`, with "
    "code that computes in float64, or a rule (`eqg.elementwise`, `def_bwd`, `def_jvp`)."
)

# For kinds whose cure differs if a value is bad, and not a cotangent.
_OF_VALUES = {
    ZERO_TIMES_INFINITY: "Zero times infinity is NaN. Replace the factor that is infinite, "
    "before the product: `jnp.where(mask, y, 0.0)`. A `where` on the product is too late for "
    "the gradient.",
    SINGULARITY: "`{op}` is not finite there. Keep its argument away from that point "
    "(`x + eps`).",
    INDETERMINATE: "`{op}` is not defined there. Keep its arguments away from that point, "
    "with a `where` around the arguments.",
}

# The same for certain operations, at their singular points.
_AT_ENDS = "`{op}` is infinite at the ends of its domain. Clip its argument: `jnp.clip(x, %s)`."
_XLOG = (
    "`{op}(x, y)` is infinite where `x` is not zero and `y` is at the end of its domain. Keep "
    "`y` inside of it (for a `logpdf`, the data)."
)
_VALUES_OF_PRIMITIVES = {
    **dict.fromkeys(("atanh", "erf_inv"), _AT_ENDS % "-1 + eps, 1 - eps"),
    "logit": _AT_ENDS % "eps, 1 - eps",
    "div": "The divisor is zero. Keep it away from zero (`y + eps`; for a count, "
    "`jnp.maximum(n, 1)`), or use `jnp.where(y == 0, 0.0, eqg.safe.divide(x, y))`.",
    **dict.fromkeys(("xlogy", "xlog1py"), _XLOG),
}

_PRODUCTS = ("mul", "square", "integer_pow", "dot_general", "reduce_prod", "cumprod")
_TOO_LARGE_A_PRODUCT = (
    "The result of `{op}` is too large for its dtype. Scale its arguments down, or add "
    "logarithms; in a loop, bound the state at each step (`jnp.clip`, `jnp.tanh`, or a "
    "normalization)."
)

# For singular points of certain operations.
_CLIPPED = (
    "The derivative of `{op}` is infinite at 1 and -1. Use `eqg.safe.arc%s(x)`, whose "
    "derivative is zero there. Clip an `x` that may round to more: `jnp.clip(x, -1, 1)`."
)
_EQUAL = (
    "The %s of equal %s have no derivative. Use `eqg.safe.%s`, which is right for every "
    "function that does not depend on the choice of them."
)
_SINGULAR = "The matrix of `{op}` is singular there. Keep it regular: `a + eps * jnp.eye(n)`."
_OF_PRIMITIVES = {
    **dict.fromkeys(SOLVES, _SINGULAR),
    **dict.fromkeys(
        LOG_DETERMINANTS,
        "The matrix of `slogdet` is singular there, and the logarithm of its determinant is "
        "infinite. Keep it regular: `a + eps * jnp.eye(n)`.",
    ),
    "cholesky": "The matrix is not positive definite there. Symmetrize it, and add a multiple "
    "of the identity: `a + eps * jnp.eye(n)`.",
    "acos": _CLIPPED % "cos",
    "asin": _CLIPPED % "sin",
    "log": "Keep the argument of `log` away from zero: `jnp.log(x + eps)`, with an `eps` of at "
    "least `jnp.finfo(x.dtype).tiny`. For `x * log(y)`, use `eqg.safe.xlogy(x, y)`. If the "
    "value `-inf` does no harm, use `eqg.safe.log(x)`, whose derivative is zero there.",
    "pow": "The derivative of `x**y` is not finite where `x` is zero and `y` less than one. "
    "Use `eqg.safe.power(x, y)`, whose derivative is zero there, or `(x + eps)**y`. For an "
    "exponent that is always whole, pass a Python `int`.",
    "rsqrt": "`rsqrt` is infinite at zero. Add a small number to its argument: "
    "`jax.lax.rsqrt(x + eps)`. In a normalization layer, such as `eqx.nn.LayerNorm`, this is "
    "the argument `eps`, which has to be larger than zero.",
    "sqrt": "The derivative of `sqrt` is infinite at zero. Use `eqg.safe.sqrt(x)`, whose "
    "derivative is zero there, or `jnp.sqrt(x + eps)`.",
    "xlogy": "The derivative of `xlogy` by its second argument is 0/0 where both are zero. Use "
    "`eqg.safe.xlogy(x, y)`, whose derivative is zero there.",
    "xlog1py": "The derivative of `xlog1py` by its second argument is 0/0 at zero and -1. "
    "Use `eqg.safe.xlog1py(x, y)`, whose derivative is zero there.",
    "logaddexp": "`logaddexp` has no derivative where both arguments are infinite. Use "
    "`eqg.safe.logaddexp(x, y)`, whose derivative is zero there.",
    "cumlogsumexp": "The derivative of `cumlogsumexp` is not defined where all entries up to "
    "one are `-inf`. Use `eqg.safe.cumlogsumexp(x)`, whose derivative is zero there.",
    "eigh": _EQUAL % ("eigenvectors", "eigenvalues", "eigh(a)"),
    "svd": _EQUAL % ("singular vectors", "singular values", "svd(a)"),
    "atan2": "`arctan2` has no derivative at (0, 0). Use `eqg.safe.arctan2(y, x)`, whose "
    "derivative is zero there.",
}

# For formulas, see `formulas.py`.
_OF_FORMULAS = {
    "log of softmax": "Use `eqg.safe.log_softmax(x)` in place of the logarithm of a "
    "softmax. Select or mask its entries before a product with them: zero times `-inf` is NaN. "
    "For the sum of `-p * log(p)`, use `eqg.safe.entropy(p)`.",
    "entropy": "Use `eqg.safe.entropy(p)` in place of the sum of `-p * log(p)`: its "
    "derivatives are finite also where `p` is zero, as entries of a softmax may be.",
    "log of sigmoid": "Use `jax.nn.log_sigmoid(x)` in place of the logarithm of the sigmoid "
    "of `x`.",
    "log of 1 - sigmoid": "Use `jax.nn.log_sigmoid(-x)` in place of the logarithm of one "
    "minus the sigmoid of `x`.",
    "softplus": "Use `jax.nn.softplus(x)` in place of `log(1 + exp(x))`.",
    "logaddexp": "Use `jnp.logaddexp(x, y)` in place of `log(exp(x) + exp(y))`.",
    "logsumexp": "Use `jax.nn.logsumexp(x)` in place of the logarithm of a sum of `exp(x)`.",
    "log of weighted exp": "Use `jax.nn.logsumexp(x, b=weights)` in place of the logarithm of "
    "a sum of `weights * exp(x)`, in which `exp(x)` underflows. With `log(... + eps)`, the "
    "gradient is finite, and without the terms that underflow.",
    "log of chosen softmax": "Use `jax.nn.logsumexp(jax.nn.log_softmax(x), b=weights)` in "
    "place of the logarithm of a sum of entries of a softmax, which underflow. The weights are "
    "one for the entries that are summed, and zero for the others.",
    "log of product": "The product underflows. Add the logarithms of its factors: that of "
    "`exp(x)` is `x`. With `log(... + eps)`, the gradient is finite, and without what "
    "underflows.",
    "exp(x) * x": "The factor `x` of `exp(x) * x` is infinite. For the sum of "
    "`-jnp.exp(x) * x`, use `eqg.safe.entropy(jnp.exp(x))`. Or replace the factor before the "
    "product: `jnp.where(jnp.isfinite(x), x, 0.0)`. A `where` on the product is too late for "
    "the gradient.",
    "derivative of a quotient": "The divisor is zero, in the derivative of a quotient. Use "
    "`eqg.safe.divide(x, y)` instead of `x / y`: its first derivatives are zero there, and its "
    "second ones are NaN. Or keep the divisor away from zero (`y + eps`).",
    "softmax": "Use `jax.nn.softmax(x)`, which subtracts the maximum first.",
    "sigmoid": "Use `jax.nn.sigmoid(x)`, which has no overflow.",
    "sigmoid of -x": "Use `jax.nn.sigmoid(-x)` in place of `1 / (1 + jnp.exp(x))`.",
    "sqrt": _OF_PRIMITIVES["sqrt"],
    "norm": "The derivative of a norm is not defined at zero. Use `eqg.safe.norm(x)`, whose "
    "derivative is zero there, and whose squares stay in range.",
    "length": "The derivative of a length is not defined at zero. Use `eqg.safe.hypot(x, y)`, "
    "whose derivative is zero there, and whose squares stay in range.",
    "rms": "The derivative of a root mean square is not defined at zero. Use "
    "`eqg.safe.sqrt(jnp.mean(x**2))`, whose derivative is zero there.",
    "deviation": "The derivative of a standard deviation is not defined for equal numbers. Use "
    "`eqg.safe.std(x)`, whose derivative is zero there.",
    "x / |x|": "Use `jnp.sign(x)` in place of `x / jnp.abs(x)`.",
    "x / norm": "A vector of length zero has no direction. Use `eqg.safe.normalize(x)`, which "
    "is zero there.",
    "log of cosh": "Use `eqg.safe.log_cosh(x)` in place of `log(cosh(x))`.",
    "log of expm1": "Use `eqg.safe.log_expm1(x)` in place of `log(exp(x) - 1)`.",
    "expm1(x) / x": "Use `eqg.safe.expm1_ratio(x)` in place of `expm1(x) / x`.",
    "log1p(x) / x": "Use `eqg.safe.log1p_ratio(x)` in place of `log1p(x) / x`.",
    "sinh(x) / x": "Use `eqg.safe.sinhc(x)` in place of `sinh(x) / x`.",
}

# Of these, the ones that are cures of dead branches as well.
_FOR_DEAD_BRANCHES = frozenset(
    ("log of softmax", "entropy", "log of weighted exp", "log of chosen softmax", "logsumexp")
)

# Of dead branches, by what does not select them, if it is no `where`.
_OF_INDEX = (
    f"Use {ZERO_SAFE}, or `{{op}}` of the elements that are used (`f(x[i])`), in place of an "
    "index into its result (`f(x)[i]`)."
)
_OF_SELECTION = (
    f"Use {ZERO_SAFE}, or `eqg.safe.where(ok, f, x, other)` inside of the `{{mask}}`, with "
    "this operation in `f`, and a constant `other` that the `{mask}` does not take."
)
_OF_BOUND = (
    "The argument of `{op}` is the constant of the `{mask}`, at which one derivative is "
    "infinite and the other zero: their product is NaN. Use {safe}, or a constant at which "
    "`{op}` has a derivative."
)

# Of operations that are not elementwise, for which `safe.where` is none.
_NOT_ELEMENTWISE = {
    DEAD_BRANCH: f"Use {ZERO_SAFE}, or replace what is not used before `{{op}}`, by numbers at "
    "which its derivative is finite: `jnp.where(ok, x, other)` on its operand.",
    MASKED_PRODUCT: "Replace what the mask drops before `{op}`, by numbers at which its "
    "derivative is finite: `jnp.where(mask != 0, x, other)` on its operand. A `where` further "
    "on, in place of the product, is too late: zero times an infinite derivative is NaN.",
}

# The function of `eqg.safe` for an operation.
_SAFE = {
    "sqrt": "sqrt(x)",
    "log": "log(x)",
    "div": "divide(x, y)",
    "pow": "power(x, y)",
    "asin": "arcsin(x)",
    "acos": "arccos(x)",
    "atan2": "arctan2(y, x)",
}

# Where a clipped argument is: at an end of the domain, at which the derivative is infinite.
_IN_PLACE = (
    " At the ends of it, the derivative is infinite: use `eqg.safe.%s`, whose derivative is "
    "zero there."
)
_AT_ENDS_OF_DOMAIN = {
    "acos": _IN_PLACE % "arccos(jnp.clip(x, -1, 1))",
    "asin": _IN_PLACE % "arcsin(jnp.clip(x, -1, 1))",
    "sqrt": _IN_PLACE % "sqrt(jnp.maximum(x, 0))",
    "pow": _IN_PLACE % "power(jnp.maximum(x, 0), y)",
    "log": " At zero, it is infinite: `jnp.log(jnp.maximum(x, eps))`.",
}

# `safe.divide` has a finite derivative, and the value of JAX: a NaN, which may be multiplied by
# what comes next.
_OTHER_DIVISOR = " Or replace the divisor before it, `x / jnp.where(y == 0, 1.0, y)`."
_OR_SAFE = " Or use `eqg.safe.{}`, whose derivative is finite there."
_OF_DIVISOR = (
    "JAX computes the derivative of `x / y` with `y**-2`, which may be out of range where the "
    "derivative is not. Use `eqg.safe.divide(x, y)`, which computes it without. If the "
    "derivative itself is too large, keep `y` away from zero, or use logarithms."
)

_IN_EMPTY_ROWS = "which has the derivative zero where all entries are `-inf`"
_AT_ZERO = "which has the derivative zero at zero"
# Functions in place of formulas in a branch that is not taken.
_SAFE_IN_DEAD_BRANCHES = {
    "shift of softmax": ("eqg.safe.softmax(x)", _IN_EMPTY_ROWS),
    "shift of log_softmax": ("eqg.safe.log_softmax(x)", _IN_EMPTY_ROWS),
    "log of shifted sum": ("eqg.safe.logsumexp(x)", _IN_EMPTY_ROWS),
    "norm": ("eqg.safe.norm(x)", _AT_ZERO),
    "length": ("eqg.safe.hypot(x, y)", _AT_ZERO),
    "rms": ("eqg.safe.sqrt(jnp.mean(x**2))", _AT_ZERO),
    "deviation": ("eqg.safe.std(x)", "which has the derivative zero for equal numbers"),
    "x / norm": ("eqg.safe.normalize(x)", "which is zero for a vector of zeros"),
    "exp(x) * x": (
        "eqg.safe.entropy(jnp.exp(x))",
        "for the sum of `-jnp.exp(x) * x`, or replace the infinite factor before the product: "
        "`jnp.where(jnp.isfinite(x), x, 0.0)`. A `where` on the product is too late",
    ),
    "derivative of a quotient": (
        "eqg.safe.divide(x, y)",
        "instead of `x / y`: its first derivatives are zero where `y` is, its second ones NaN",
    ),
}

# For formulas of a row whose entries are all `-inf`.
_OF_EMPTY_ROWS = {
    "shift of softmax": "A softmax is not defined where all entries are `-inf`. Use "
    "`eqg.safe.softmax(x)`, which is zero there.",
    "shift of log_softmax": "The logarithm of a softmax is not defined where all entries are "
    "`-inf`. Use `eqg.safe.log_softmax(x)`, which is `-inf` there, with the derivative zero.",
    "log of shifted sum": "The sum of `exp(x)` is zero where all entries are `-inf`. Use "
    "`eqg.safe.logsumexp(x)`, whose derivative is zero there. Its value is `-inf`, which a "
    "`jnp.where` on the result can replace.",
}

# Of a rule of the user's, which may not be finite where the derivative is.
_IN_A_RULE = (
    "The rule of `{op}` is %s there. If the derivative has a limit, compute it in the rule, "
    "with a `jnp.where` on the arguments of the quotient, root or logarithm: one on the result "
    "keeps the value, and not its derivative. If it has none, keep the argument of `{op}` away "
    "from that point (`x + eps`)."
)
_OF_RULES = {SINGULARITY: _IN_A_RULE % "infinite", INDETERMINATE: _IN_A_RULE % "not defined"}

# Of a function with the derivative zero at a kink, in a derivative that the loss takes.
NO_SECOND = (
    " Its second derivative is NaN there. If what the loss computes from it is smooth there, "
    "as `norm(x)**2` is, compute it without (`jnp.sum(x**2)`), or write a rule for it."
)

# Of such a function of `eqg.safe`, where the second derivative is NaN.
_AT_A_CORNER = (
    "`{function}` has a kink or a pole there: its first derivative is a convention, and its "
    "second one does not exist. If a mask drops the element, mask the argument as well: "
    "`eqg.safe.where(ok, f, x, other)`, with `{function}` in `f`. Or use `eqg.zero_safe(f)` "
    "for the function `f` that you differentiate. If what is computed from it is smooth there, "
    "as `norm(x)**2` is, compute it without: `jnp.sum(x**2)`. The docs have kernels of a "
    "distance, in `recipes/nan-and-zero`."
)

# Of what is not finite in a derivative that the loss takes itself, such as a force.
IN_A_DERIVATIVE = (
    " It is in a derivative that the loss takes. If a `where` drops the operation there, this "
    'also helps: `eqg.zero_safe(f, policy="zero")` in place of the function `f` that is '
    "differentiated."
)


def cure_of(
    kind: str,
    primitive: str,
    formula: str,
    *,
    is_value: bool,
    explodes: bool = False,
    mask: str = "",
    is_direct: bool = False,
    is_bound: bool = False,
    by_zero: bool = False,
) -> str:
    """What to do at an operation of the loss.

    - `mask`: of a dead branch, what does not select it, in the user's words; `is_direct`:
        whether that is given the result, and not, for example, a sorted one; `is_bound`:
        whether the argument is a constant of it.
    - `formula`: what it is a part of, if that is known; see `formulas.py`.
    - `by_zero`: of a quotient, whether the divisor is zero.
    - `explodes`: of an overflow, whether it is that of a product with a finite cotangent.
    """
    if kind == OVERFLOW and explodes:
        return _EXPLODES.format(op=primitive)
    cures = {**_OF_KINDS, **_OF_VALUES} if is_value else _OF_KINDS
    text = cures[kind] if kind in cures else _of_constant(kind)
    if kind == DOMAIN:
        text += _AT_ENDS_OF_DOMAIN.get(primitive, "")
    if kind == OVERFLOW and primitive in _PRODUCTS:
        text = _TOO_LARGE_A_PRODUCT
    if kind == DEAD_BRANCH and mask not in ("", "where"):
        is_index = mask in ("index", "slice") and is_direct
        text = _OF_INDEX if is_index else _OF_SELECTION
    if kind == DEAD_BRANCH and is_bound:
        text = _OF_BOUND
    if kind == DEAD_BRANCH and formula in _FOR_DEAD_BRANCHES:
        text = _OF_FORMULAS[formula]
    if kind == DEAD_BRANCH and primitive in ("eigh", "svd", "cumlogsumexp"):
        text = _OF_PRIMITIVES[primitive]
    if primitive not in ELEMENTWISE and text == _OF_KINDS.get(kind):
        text = _NOT_ELEMENTWISE.get(kind, text)
    if kind == DEAD_BRANCH and formula in _SAFE_IN_DEAD_BRANCHES:
        function, why = _SAFE_IN_DEAD_BRANCHES[formula]
        text = f"Use {ZERO_SAFE}, or `{function}`, {why}."
    if kind == MASKED_PRODUCT and formula in _SAFE_IN_DEAD_BRANCHES:
        function, why = _SAFE_IN_DEAD_BRANCHES[formula]
        text = f"Use `{function}`, {why}."
    elif kind == MASKED_PRODUCT and primitive in _SAFE:
        text += _OR_SAFE.format(_SAFE[primitive])
    if kind == DEAD_BRANCH and primitive == "div" and text == _OF_KINDS[DEAD_BRANCH]:
        text += _OTHER_DIVISOR if by_zero else _OR_SAFE.format(_SAFE[primitive])
    if kind == OVERFLOW and primitive == "div" and not is_value:
        text = _OF_DIVISOR
    if kind in (*_AT_POINTS, OVERFLOW, ZERO_TIMES_INFINITY):
        # Of terms that cancel, and of what underflows, the text on the kind says more.
        at_pole = kind in _AT_POINTS or (kind == ZERO_TIMES_INFINITY and not mask)
        text = _OF_PRIMITIVES.get(primitive, text) if at_pole else text
        if at_pole and is_value:
            text = _VALUES_OF_PRIMITIVES.get(primitive, text)
        text = _OF_FORMULAS.get(formula, text)
        text = _OF_EMPTY_ROWS.get(formula, text) if at_pole else text
    if primitive == "host_call" and kind in (SINGULARITY, INDETERMINATE, OVERFLOW):
        text = _HOST_VALUE if is_value else _HOST_DERIVATIVE
    safe = _SAFE.get(primitive)
    safe = f"`eqg.safe.{safe}`" if safe else "a function of `eqg.safe`"
    return text.format(op=primitive, mask=mask, safe=safe)


def cure_at_corner(function: str) -> str:
    """What to do where a function of `eqg.safe` has no second derivative."""
    return _AT_A_CORNER.format(function=function)


def cure_of_rule(kind: str, primitive: str) -> str:
    """What to do if a rule of the user's is not finite, or an empty string for other kinds."""
    return _OF_RULES[kind].format(op=primitive) if kind in _OF_RULES else ""


def cure_of_dropped_nan(name: str) -> str:
    """What to do about a NaN that is an operand of what is not selected.

    - `name`: of the argument that holds it, if that is known.
    """
    what = f"`{name}` holds a NaN" if name else "An operand is NaN already"
    array = name if name.isidentifier() else "x"
    return (
        f"{what}, and its product with a zero cotangent is NaN. Replace it where it comes "
        f"from, before it is used. Compute `ok` from the data first, `jnp.isfinite({array})`, "
        f"then `jnp.where(ok, {array}, 0.0)`. A `where` on the result is too late."
    )


def has_cure(primitive: str, formula: str) -> bool:
    """Whether there is one for this operation, or for what it is a part of."""
    return primitive in _OF_PRIMITIVES or formula in _OF_FORMULAS


def cure_of_infinite_operand(primitive: str, name: str) -> str:
    """What to do about an infinite value whose product with a cotangent, zero, is NaN.

    - `name`: of the argument that holds it, if that is known.
    """
    what = f"`{name}` holds an infinity" if name else f"An operand of `{primitive}` is infinite"
    array = name if name.isidentifier() else "x"
    return (
        f"{what}, and its product with a cotangent that is zero is NaN. Use "
        f"`eqg.safe.where(jnp.isfinite({array}), f, {array}, limit)`, with all in `f` that is "
        "computed from it until the result is finite, `limit`. A `where` on the result only is "
        "too late."
    )


def _of_constant(kind: str) -> str:
    what = "NaN" if kind == INPUT else "infinity"
    return f"A constant of the loss holds the {what}. Replace it before it is used."


def cure_of_input(kind: str, name: str, leaf: str) -> str:
    """What to do about an input of the loss that is not finite.

    - `leaf`: its path in the model, if it is one of the parameters.
    """
    what = "NaN" if kind == INPUT else "infinity"
    if leaf:
        holder = "model" if leaf == "model" else f"parameter `{leaf}`"
        return (
            f"The {holder} holds the {what} itself. Look at the initialization, or "
            "at the update that made it, with the parameters from before."
        )
    return (
        f"`{name}` holds the {what}. Replace it there before it is used. A `where` on the "
        "result is too late."
    )
