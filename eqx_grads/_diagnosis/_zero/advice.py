"""The cure of each kind of zero gradient: the one table of `explain_zero`."""

import os
from typing import NamedTuple

from ..._control_flow.truncated import TRUNCATION
from ..._jaxprs.structure import CallWithRule, structure, While
from ..._jaxprs.versions import function_file
from ..._rules.without_tangents import WITHOUT_TANGENTS
from ..origins import Origin


_STEP = (
    "For a spike or a gate, use `eqg.surrogates.spike(x, eqg.surrogates.atan())`. For a "
    "switch, use `jax.nn.sigmoid(x)`; for its time, `eqg.event_time` and `eqg.jump`."
)
_SEARCH = (
    "A search has no derivative, but its result has one. Decorate the search with "
    "`eqg.implicit`; for the time of an event, use `eqg.event_time`, or `diffrax.Event` with a "
    "real-valued condition and a `root_finder`."
)

# By kind. `{name}` is the operation.
CURES = {
    "never used": "The loss does not use this leaf. Look for an attribute that is not called, "
    "or for a value that is overwritten.",
    "closed over": "The loss uses this array, but from a closure or a global variable. Use the "
    "model that is the argument of the loss.",
    "argmax": "Multiply by `eqg.ste.one_hot_argmax(logits)` instead of indexing.",
    "sampled category": "Use `eqg.ste.gumbel_softmax(logits, key=key)`, which samples with an "
    "estimate of the gradient.",
    "sampled bits": "Use `eqg.ste.bernoulli(p, key=key)`, which samples with an estimate "
    "of the gradient.",
    "order": "Indices have no derivative. Use the sorted values; to choose, multiply by the "
    "mask `eqg.ste.top_k(x, k)`.",
    "number of a bin": "Interpolate between the entries of the bins: "
    "`jnp.interp(x, bins, entries)`.",
    "rounding": "Use `eqg.ste.{name}(x)`: it has this value and the derivative of the "
    "identity.",
    "sign": "Use `eqg.ste.sign(x)`.",
    "comparison": _STEP,
    "comparison in a while_loop": _SEARCH,
    "predicate of a while_loop": _SEARCH,
    "cast to an integer": "Use `eqg.ste.round(x)`, `eqg.ste.floor(x)` or `eqg.ste.trunc(x)`, "
    "and keep the value a float.",
    "stop_gradient": "Remove `stop_gradient` to train the leaf.",
    "rule without a derivative": "The rule of this function returns zero. Change the rule, or "
    "use `eqg.replace_gradient(value, surrogate)`.",
    "initial guess": "The solution does not depend on it. For the derivative of the "
    "iterations, use `optimistix.RecursiveCheckpointAdjoint`, or remove `eqg.implicit`.",
    "no derivative": "JAX defines the derivative of this operation as zero. "
    "`eqg.replace_gradient(value, surrogate)` gives it another one.",
    "multiplied by zero": "Start the factor at another value. Zero is usual for the last layer "
    "of an adapter, which learns first.",
    "dead units": "Use `jax.nn.leaky_relu(x)`, or another initialization of the bias; for a "
    "clip, `eqg.ste.clip(x, min, max)`.",
    "masked": "For these arguments, the mask selects no element. Check the mask.",
    "saturated": "Scale the inputs down, or compute the loss from logits, as "
    "`optax.losses.sigmoid_binary_cross_entropy(logits, labels)` does.",
    "zero derivative": "The value is at a stationary point of this operation, as zero is of a "
    "square. Start elsewhere.",
    "kink": "The value is exactly at a kink, where the derivative is defined as zero. Start "
    "elsewhere.",
    "underflow": "The product is too small for its dtype. Scale the loss, or see with "
    "`eqg.gradient_flow(loss, model)` where the gradient vanishes.",
    "branch not taken": "These arguments take another branch of the `cond`.",
    "not selected": "These arguments select none of its elements. Check the index, the slice "
    "or the maximum that takes elements of the result.",
    "canceled": "Terms of the gradient cancel exactly: for these arguments, the loss does not "
    "change to first order in this leaf.",
    "dropped by zero_safe": "`zero_safe` drops the derivative of what a `where` does not take. "
    "If the function has a limit there, write it with its limit, as `eqg.safe.expm1_ratio(x)` "
    "is. `eqg.explain_nan` of this loss says where.",
    "truncated": "It is only used in steps before the last window. Use a larger `truncate`.",
}

# By what the value decides, and for a function of a library.
_INDEX = (
    "Interpolate between entries, with `i = jnp.floor(x).astype(int)` and "
    "`r = x - jnp.floor(x)`: `(1 - r) * table[i] + r * table[i + 1]`."
)
_FIRST_CROSSING = (
    "Interpolate to the crossing of `y` and `c`, with `i` the first index "
    "after it: `x[i - 1] + (c - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1])`."
)
_INTEGER_INPUT = (
    "`{name}` returns integers because its input has integers. Pass floats: `x.astype(float)`."
)
_NEAREST_ENTRY = (
    "`{name}` rounds to the nearest entry. Ask it to interpolate, as with `order=1`."
)
_ARGMIN = (
    "Multiply by `eqg.ste.one_hot_argmax(-x)` instead of indexing. For the nearest entry of a "
    "codebook, use `eqg.nn.VectorQuantizer`."
)
# Where the loss has functions with rules, or `stop_gradient`.
_CANCELED_WITH_RULES = (
    "Terms of the gradient cancel exactly, but the loss has a rule or a `stop_gradient`, and "
    "may change in this leaf all the same. For the remainder of a rounding, use "
    "`x - jnp.round(x)`."
)
_OTHER_BRANCH = (
    "For these arguments, the `where`, or the `cond` under a `vmap`, takes the other branch. "
    "If it is a ReLU, use `jax.nn.leaky_relu(x)`."
)
_ZERO_RULE = (
    "The rule of `{name}` gives zero for these arguments. For a surrogate far from its "
    "threshold, use a wider one, as `eqg.surrogates.atan()`, or larger inputs."
)
# Of a factor that is not a leaf.
_COMPUTED_FACTOR = "Start the factor at another value, or correct what makes it zero."
_ZERO_OF_SAFE = (
    "`{name}` has the derivative zero where there is none, such as at zero. Keep its argument "
    "away from that point, or write what is smooth there without it, as `jnp.sum(x**2)`."
)

# The kind of an operation without a derivative.
_KINDS = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"), "comparison"),
    "heaviside": "comparison",
    **dict.fromkeys(("argmax", "argmin"), "argmax"),
    **dict.fromkeys(("round", "floor", "ceil", "trunc", "rint", "fix"), "rounding"),
    **dict.fromkeys(("sort", "top_k", "approx_top_k", "argsort"), "order"),
    **dict.fromkeys(("lt_to", "le_to", "SearchSorted"), "number of a bin"),
    **dict.fromkeys(("digitize", "searchsorted"), "number of a bin"),
    "sign": "sign",
    "convert_element_type": "cast to an integer",
    "bitcast_convert_type": "cast to an integer",
    "stop_gradient": "stop_gradient",
}


class Advice(NamedTuple):
    kind: str
    cure: str


def without_derivative(
    origin: Origin, around: list[Origin], uses: set[str], is_random: bool
) -> Advice:
    """The kind and the cure of an operation without a derivative.

    - `around`: the equations that it is in, innermost first.
    - `uses`: what its output decides; "" if the loss depends on it otherwise.
    """
    name = origin.primitive
    stack = str(origin.eqn.source_info.name_stack)
    if origin.source.library.startswith("optimistix"):
        return Advice("initial guess", CURES["initial guess"])
    if isinstance(structure(origin.eqn), CallWithRule):
        return Advice("rule without a derivative", CURES["rule without a derivative"])
    if WITHOUT_TANGENTS in stack:
        return Advice("initial guess", CURES["initial guess"])
    kind = _KINDS.get(name, "no derivative")
    if is_random and kind in ("argmax", "number of a bin", "comparison"):
        kind = "sampled bits" if kind == "comparison" else "sampled category"
        return Advice(kind, CURES[kind])
    if kind == "comparison" and uses == {"while"}:
        kind = "predicate of a while_loop"
    elif kind == "comparison" and any(isinstance(structure(o.eqn), While) for o in around):
        kind = "comparison in a while_loop"
    library = _library_function([origin, *around])
    if library is not None and kind in ("rounding", "cast to an integer", "no derivative"):
        kind = "rounding" if kind == "no derivative" else kind
        has_floats = any(
            "float" in str(v.aval.dtype)
            for v in library.eqn.outvars
            if hasattr(v.aval, "dtype")
        )
        cure = _NEAREST_ENTRY if has_floats else _INTEGER_INPUT
        return Advice(kind, cure.format(name=library.primitive.lstrip("_")))
    if kind == "comparison" and uses == {"a first crossing"}:
        return Advice(kind, _FIRST_CROSSING)
    if kind in ("rounding", "cast to an integer") and uses == {"an index"}:
        return Advice(kind, _INDEX)
    if name == "argmin":
        return Advice(kind, _ARGMIN)
    return Advice(
        kind, CURES[kind].format(name={"rint": "round", "fix": "trunc"}.get(name, name))
    )


def _library_function(around: list[Origin]) -> Origin | None:
    """The function of SciPy in JAX, or of its images, that an operation is in."""
    folders = (os.path.join("jax", "_src", "scipy"), os.path.join("jax", "_src", "image"))
    for one in reversed(around):
        programs = getattr(structure(one.eqn), "programs", ())
        if len(programs) == 1 and any(f in function_file(*programs) for f in folders):
            return one
    return None


def at_values(
    kind: str,
    origin: Origin | None,
    *,
    has_rules: bool = False,
    is_rule: bool = False,
    is_of_leaf: bool = False,
    safe: str = "",
) -> str:
    """The cure of a kind that depends on the values.

    - `has_rules`: whether the loss has functions with rules, whose derivatives may be wrong.
        `is_rule`: whether this operation is one.
    - `is_of_leaf`: whether the factor that is zero is a leaf.
    - `safe`: the function of `eqx_grads.safe` whose derivative is zero, if it is one.
    """
    name = origin.primitive if origin else ""
    if safe and kind in ("multiplied by zero", "zero derivative", "kink"):
        return _ZERO_OF_SAFE.format(name=safe)
    if kind == "multiplied by zero" and not is_of_leaf:
        return _COMPUTED_FACTOR
    if (kind, name) == ("dead units", "select_n"):
        return _OTHER_BRANCH
    if kind == "zero derivative" and is_rule:
        return _ZERO_RULE.format(name=name)
    if kind == "canceled" and has_rules:
        return _CANCELED_WITH_RULES
    return CURES[kind].format(name=name)


def is_truncation(origin: Origin) -> bool:
    """Whether an equation cuts the derivative between two windows of a `filter_scan`."""
    return TRUNCATION in str(origin.eqn.source_info.name_stack)
