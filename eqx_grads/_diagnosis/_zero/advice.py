"""The cure of each kind of zero gradient: the one table of `explain_zero`."""

from collections.abc import Sequence

from ..._control_flow.scan_backward import TRUNCATION
from ..._jaxprs.structure import CallWithRule, structure, While
from ..._rules.without_tangents import WITHOUT_TANGENTS
from ..origins import Origin
from ..source_lines import is_of_jax


_SEARCH = (
    "A search has no derivative, but its result has one: decorate the search with "
    "`eqg.implicit`, or, for the time of an event, use `eqg.event_time` or `diffrax.Event` "
    "with a real-valued condition and a `root_finder`."
)

_INDEX = (
    "For an index, use `jnp.interp(x, jnp.arange(n, dtype=x.dtype), table)`. In a library, "
    "pass floats, `x.astype(float)`, and ask it to interpolate, as by `order=1`."
)

# By kind. `{name}` is the operation.
CURES = {
    "never used": "The loss does not use this leaf. Look for an attribute that is not called, "
    "or for a value that is overwritten.",
    "closed over": "The loss uses this array from a closure. Use the model that it is given.",
    "argmax": "Multiply by `eqg.ste.one_hot_argmax(logits)` instead of indexing.",
    "sampled category": "Use `eqg.ste.gumbel_softmax(logits, key=key)`.",
    "sampled bits": "Use `eqg.ste.bernoulli(p, key=key)`.",
    "order": "Use the sorted values; to choose, multiply by the mask `eqg.ste.top_k(x, k)`.",
    "number of a bin": "Interpolate between the entries: `jnp.interp(x, bins, entries)`.",
    "rounding": f"Use `eqg.ste.{{name}}(x)`: it has the derivative of the identity. {_INDEX}",
    "sign": "Use `eqg.ste.sign(x)`.",
    "comparison": "For a spike or a gate, use `eqg.surrogates.spike(x, "
    "eqg.surrogates.atan())`. For a switch, use `jax.nn.sigmoid(x)`; for its time, "
    "`eqg.event_time` and `eqg.jump`. For the first crossing in a table, interpolate to it.",
    "comparison in a while_loop": _SEARCH,
    "cast to an integer": "Keep the value a float, and use `eqg.ste.round(x)` or "
    f"`eqg.ste.floor(x)`. {_INDEX}",
    "stop_gradient": "Remove `stop_gradient` to train the leaf.",
    "rule without a derivative": "The rule of this function returns zero. Change the rule, or "
    "use `eqg.replace_gradient(value, surrogate)`.",
    "initial guess": "The solution does not depend on it. To differentiate the iterations, "
    "use `optimistix.RecursiveCheckpointAdjoint`, or remove `eqg.implicit`.",
    "no derivative": "Give it a derivative: `eqg.replace_gradient(value, surrogate)`. In a "
    "library, ask it to interpolate, as by `order=1`.",
    "multiplied by zero": "Start the factor at another value, unless it is the last layer of "
    "an adapter, which learns first.",
    "dead units": "`{name}` selects its other operand for all these elements. Change the "
    "initialization or the data. A hinge loss is at its minimum there.",
    "masked": "For these arguments, the mask selects no element. Check the mask.",
    "saturated": "Scale the inputs down. Compute a loss of probabilities from logits, as "
    "`optax.losses.sigmoid_binary_cross_entropy(logits, labels)` does.",
    "zero derivative": "The value is at a stationary point of this operation. Start elsewhere.",
    "kink": "The value is at a kink, where the derivative is defined as zero. Start elsewhere.",
    "underflow": "The product is too small for its dtype. Scale the loss, or see with "
    "`eqg.gradient_flow(loss, model)` where the gradient vanishes.",
    "branch not taken": "These arguments take another branch of the `cond`.",
    "not selected": "These arguments select none of its elements. Check the index, the slice, "
    "the maximum, or the number of steps of the loop that takes them.",
    "canceled": "Terms of the gradient cancel exactly. If there is a rule or a "
    "`stop_gradient`, the loss may change all the same: for the remainder of a rounding, use "
    "`x - jnp.round(x)`. If there is a softmax, it may be saturated: scale its argument down.",
    "dropped by zero_safe": "`zero_safe` drops the derivative of what a `where` does not take. "
    "`eqg.explain_nan` of this loss says where.",
    "truncated": "It is only used in steps before the last window. Use a larger `truncate`.",
}

# The cures of a kind in special cases.
SPECIAL = {
    "argmin": "Multiply by `eqg.ste.one_hot_argmax(-x)` instead of indexing. For the nearest "
    "entry of a codebook, use `eqg.nn.VectorQuantizer`.",
    "activation": "Use `jax.nn.leaky_relu(x)`, or another initialization of the bias.",
    "clip": "Use `eqg.ste.clip(x, min, max)`, or keep the value in the range.",
    "select": "For these arguments, the `where`, or the `cond` under a `vmap`, takes the other "
    "branch. If it is a ReLU, use `jax.nn.leaky_relu(x)`.",
    "rule": "The rule of `{name}` gives zero for these arguments. Use a wider surrogate, as "
    "`eqg.surrogates.atan()`, or larger inputs.",
    "factor": "Start the factor at another value, or correct what makes it zero.",
    "safe": "`{name}` has a zero derivative where the true one does not exist, such as at "
    "zero. Keep its argument away from that point, or write what is smooth there without it, "
    "as `jnp.sum(x**2)`.",
}

# The kind of an operation without a derivative.
_KINDS = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"), "comparison"),
    "heaviside": "comparison",
    **dict.fromkeys(("argmax", "argmin"), "argmax"),
    **dict.fromkeys(("round", "floor", "ceil", "trunc", "rint", "fix"), "rounding"),
    **dict.fromkeys(("sort", "top_k", "approx_top_k", "argsort"), "order"),
    **dict.fromkeys(("lt_to", "le_to", "SearchSorted"), "number of a bin"),
    **dict.fromkeys(("digitize", "searchsorted"), "number of a bin"),
    **dict.fromkeys(("convert_element_type", "bitcast_convert_type"), "cast to an integer"),
    "sign": "sign",
    "stop_gradient": "stop_gradient",
}


def without_derivative(around: Sequence[Origin], is_random: bool) -> tuple[str, str]:
    """The kind and the cure of an operation without a derivative.

    - `around`: the operation, and the equations that it is in, innermost first.
    """
    origin = around[0]
    name, stack = origin.primitive, str(origin.eqn.source_info.name_stack)
    kind, cure = _KINDS.get(name, "no derivative"), ""
    if origin.source.library.startswith("optimistix") or WITHOUT_TANGENTS in stack:
        kind = "initial guess"
    elif isinstance(structure(origin.eqn), CallWithRule):
        kind = "rule without a derivative"
    elif is_random and kind in ("argmax", "number of a bin", "comparison"):
        kind = "sampled bits" if kind == "comparison" else "sampled category"
    elif kind == "comparison" and any(isinstance(structure(o.eqn), While) for o in around):
        kind = "comparison in a while_loop"
    elif name == "argmin":
        cure = "argmin"
    text = SPECIAL[cure] if cure else CURES[kind]
    return kind, text.format(name={"rint": "round", "fix": "trunc"}.get(name, name))


_ACTIVATIONS = ("relu", "relu6", "elu", "selu", "celu", "hard_tanh")
_SELECTIONS = {"select_n": "select", "clip": "clip", "clamp": "clip"}


def at_values(kind: str, origin: Origin, *, is_of_leaf: bool, safe: str) -> str:
    """The cure of a kind that depends on the values.

    - `is_of_leaf`: whether the factor that is zero is a leaf.
    - `safe`: the function of `eqx_grads.safe` whose derivative is zero, if it is one.
    """
    case, name = "", origin.primitive
    is_rule = isinstance(structure(origin.eqn), CallWithRule) and not is_of_jax(origin.eqn)
    if safe and kind in ("multiplied by zero", "zero derivative", "kink"):
        case, name = "safe", safe
    elif kind == "multiplied by zero" and not is_of_leaf:
        case = "factor"
    elif kind == "dead units":
        case = "activation" if name in _ACTIVATIONS else _SELECTIONS.get(name, "")
    elif kind == "zero derivative" and is_rule:
        case = "rule"
    return (SPECIAL[case] if case else CURES[kind]).format(name=name)


def is_truncation(origin: Origin) -> bool:
    """Whether an equation cuts the derivative between two windows of a `filter_scan`."""
    return TRUNCATION in str(origin.eqn.source_info.name_stack)
