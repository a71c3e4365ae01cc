"""The cure of each kind of zero gradient: the one table of `explain_zero`."""

from collections.abc import Sequence

from ..._control_flow.scan_backward import TRUNCATION
from ..._jaxprs.structure import CallWithRule, structure, While
from ..._rules.without_tangents import WITHOUT_TANGENTS
from ..origins import Origin


_INDEX = (
    "For an index, use `jnp.interp(x, jnp.arange(n, dtype=x.dtype), table)`. In a library, "
    "pass floats, `x.astype(float)`, and ask it to interpolate, as by `order=1`."
)

# By kind. `{name}` is the operation.
_CURES = {
    "never used": "The loss does not use this leaf. Look for an attribute that is not called, "
    "or for a value that is overwritten.",
    "closed over": "The loss uses this array from a closure. Use the model that it is given.",
    "argmax": "Instead of an error rate, use a cross-entropy. Instead of indexing, multiply by "
    "`eqg.ste.one_hot_argmax(x)`, or, for an `argmin`, by `eqg.ste.one_hot_argmax(-x)`. For a "
    "sample, use `eqg.ste.gumbel_softmax(logits, key=key)`; for a codebook, "
    "`eqg.nn.VectorQuantizer`.",
    "order": "Use the sorted values; to choose, multiply by the mask `eqg.ste.top_k(x, k)`.",
    "number of a bin": "Interpolate between the entries: `jnp.interp(x, bins, entries)`.",
    "rounding": f"Use `eqg.ste.{{name}}(x)`: it has the derivative of the identity. {_INDEX}",
    "sign": "Use `eqg.ste.sign(x)`.",
    "comparison": "For a spike or a gate, use `eqg.surrogates.spike(x, "
    "eqg.surrogates.atan())`; for a sample, `eqg.ste.bernoulli(p, key=key)`. For a switch, use "
    "`jax.nn.sigmoid(x)`; for its time, `eqg.event_time` and `eqg.jump`. For the first "
    "crossing in a table, interpolate to it.",
    "comparison in a while_loop": "A search has no derivative, but its result has one: "
    "decorate the search with `eqg.implicit`, or, for the time of an event, use "
    "`eqg.event_time` or `diffrax.Event` with a real-valued condition and a `root_finder`.",
    "cast to an integer": "Keep the value a float, and use `eqg.ste.round(x)` or "
    f"`eqg.ste.floor(x)`. {_INDEX}",
    "stop_gradient": "Remove `stop_gradient` to train the leaf.",
    "rule without a derivative": "The rule of this function returns zero. Change the rule, or "
    "use `eqg.replace_gradient(value, surrogate)`.",
    "initial guess": "The solution does not depend on it, and an auxiliary output has no "
    "derivative: compute that from the solution. To differentiate the iterations, use "
    "`optimistix.RecursiveCheckpointAdjoint`, or remove `eqg.implicit`.",
    "truncated": "It is only used in steps before the last window. Use a larger `truncate`.",
    "no derivative": "Give it a derivative: `eqg.replace_gradient(value, surrogate)`. In a "
    "library, ask it to interpolate, as by `order=1`.",
    "multiplied by zero": "Start the factor at another value, or correct what makes it zero. "
    "Leave it if it is the last layer of an adapter, which learns first.",
    "dead units": "`{name}` passes no gradient for these elements. Change the initialization "
    "or the data. For a ReLU, use `jax.nn.leaky_relu(x)`; for a clip, "
    "`eqg.ste.clip(x, min, max)`. A `cond` under a `vmap` becomes a `where`.",
    "masked": "For these arguments, the mask selects no element. Check the mask.",
    "saturated": "Scale the inputs down. Compute a loss of probabilities from logits, as "
    "`optax.losses.sigmoid_binary_cross_entropy(logits, labels)` does.",
    "zero derivative": "`{name}` is at a stationary point or a kink, or its rule gives zero "
    "there. Start elsewhere. For a spike, use a wider surrogate, as `eqg.surrogates.atan()`.",
    "underflow": "The result is too small for its dtype. Scale the loss, use a wider dtype, "
    "or see with `eqg.gradient_flow(loss, model)` where the gradient vanishes.",
    "branch not taken": "These arguments take another branch of the `cond`.",
    "not selected": "These arguments select none of its elements. Check the index, the slice, "
    "the maximum, or the number of steps of the loop that takes them.",
    "canceled": "Terms of the gradient cancel exactly. If there is a rule or a "
    "`stop_gradient`, the loss may change all the same: for the remainder of a rounding, use "
    "`x - jnp.round(x)`. If there is a softmax, it may be saturated: scale its argument down.",
}
_OF_SAFE = (
    "The derivative of `{name}` is zero here: the true one does not exist, as of a norm at "
    "zero, or is zero or too small for its dtype. Keep its argument away from that point, or "
    "write what is smooth there without it, as `jnp.sum(x**2)`."
)


def cure_of(kind: str, name: str = "", safe: str = "") -> str:
    """What to do. `safe`: the function of `eqx_grads.safe` whose derivative is zero."""
    if safe and kind in ("multiplied by zero", "zero derivative"):
        return _OF_SAFE.format(name=safe)
    return _CURES[kind].format(name={"rint": "round", "fix": "trunc"}.get(name, name))


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


def kind_without_derivative(around: Sequence[Origin]) -> str:
    """The kind of an operation without a derivative.

    - `around`: the operation, and the equations that it is in, innermost first.
    """
    origin, kind = around[0], _KINDS.get(around[0].primitive, "no derivative")
    is_in = lambda name, o: name in str(o.eqn.source_info.name_stack)
    if any(is_in(TRUNCATION, o) for o in around):
        return "truncated"  # between two windows of a `filter_scan`
    if origin.source.library.startswith("optimistix") or is_in(WITHOUT_TANGENTS, origin):
        return "initial guess"
    if isinstance(structure(origin.eqn), CallWithRule):
        return "rule without a derivative"
    if kind == "comparison" and any(isinstance(structure(o.eqn), While) for o in around):
        return "comparison in a while_loop"
    return kind
