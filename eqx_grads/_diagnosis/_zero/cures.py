"""What to do about each kind of zero gradient: the one table of `explain_zero`."""

from collections.abc import Mapping


_ROUNDING = (
    "Use `eqg.ste.{name}(x)`: it has this value and the derivative of the identity. "
    "Other derivatives: `eqg.ste.wrap(fn)`, `eqg.surrogates`."
)
_STEP = (
    "For a value such as a spike or a gate, use `eqg.surrogates.spike(x, "
    "eqg.surrogates.atan())` or `eqg.ste.heaviside(x)`. "
    "For a switch, use a smooth one such as `jax.nn.sigmoid(x)`, or split the integral at the "
    "time of the switch with `eqg.event_time` and `eqg.jump`."
)
_SEARCH = (
    "The steps of a search have no derivative, but its result has one: it solves an equation "
    "f(x, w) = 0. Decorate the search with `eqg.implicit`. For the time of an event, use "
    "`eqg.event_time`, or `diffrax.Event` with a real-valued condition and a `root_finder`."
)

# By kind. `{name}` is the primitive.
CURES: Mapping[str, str] = {
    "never used": "The loss does not use this leaf. Look for an attribute that is not called, "
    "for a value that is overwritten, or for an array without entries, such as the edges of a "
    "graph that has none.",
    "closed over": "The loss uses this array, but one that it closes over or finds in a global "
    "variable. Use the model that is the argument of the loss.",
    "argmax": "Use `eqg.ste.one_hot_argmax(logits)`, or `eqg.ste.gumbel_softmax(logits, "
    "key=key)`, and multiply by it in place of indexing.",
    "sampled category": "Use `eqg.ste.gumbel_softmax(logits, key=key)` or "
    "`eqg.ste.reinmax(logits, key=key)`, which sample with an estimate of the gradient.",
    "sampled bits": "Use `eqg.ste.bernoulli(p, key=key)` or `eqg.ste.gumbel_sigmoid(logits, "
    "key=key)`, which sample with an estimate of the gradient.",
    "order": "Indices have no derivative. Use the sorted values, or to choose, multiply by the "
    "mask `eqg.ste.top_k(x, k)`, `eqg.ste.one_hot_argmax(logits)` or "
    "`eqg.ste.gumbel_softmax(logits, key=key)`.",
    "number of a bin": "In which bin a value is has no derivative. Interpolate between the "
    "entries of the bins with `jnp.interp(x, bins, entries)`, or take the mean of all entries "
    "with weights such as `jax.nn.softmax(-((x - centers) / width) ** 2)`.",
    "rounding": _ROUNDING,
    "sign": "Use `eqg.ste.sign(x)` or `eqg.ste.binary_sign(x)`, or another surrogate: "
    "`2 * eqg.surrogates.spike(x, eqg.surrogates.atan()) - 1`.",
    "comparison": _STEP,
    "comparison in a while_loop": f"{_SEARCH} {_STEP}",
    "predicate of a while_loop": _SEARCH,
    "cast to an integer": "Use `eqg.ste.round(x)`, `eqg.ste.floor(x)` or "
    "`eqg.ste.trunc(x)`, and keep the value a float.",
    "stop_gradient": "Take `stop_gradient` away if the leaf is to be trained.",
    "rule without a derivative": "The rule of this function returns zero for it. Change the "
    "rule, or use `eqg.replace_gradient(value, surrogate)`.",
    "initial guess": "An implicit derivative is zero in the initial guess, and in all else "
    "that only the solver sees: the solution does not depend on it. For the derivative of "
    "the iterations, use `optimistix.RecursiveCheckpointAdjoint`, or take `eqg.implicit` away.",
    "no derivative": "JAX defines the derivative of this operation as zero. "
    "`eqg.replace_gradient(value, surrogate)` or `eqg.custom_jvp(fn)` gives it another one.",
    "multiplied by zero": "Give the factor other values, or correct what makes it zero.",
    "dead units": "Use `jax.nn.leaky_relu(x)`, a smaller learning rate or another "
    "initialization of the bias; `eqg.ste.clip(x, min, max)` for a clip.",
    "masked": "The mask takes nothing of it for these arguments. Check the mask.",
    "saturated": "Scale the inputs down, normalize them, or compute the loss from logits (for "
    "example `optax.losses.sigmoid_binary_cross_entropy(logits, labels)`).",
    "zero derivative": "The value is at a stationary point of this operation, as zero is of a "
    "square. Start elsewhere. If dead units make the value zero, mend them first.",
    "underflow": "The product is too small for its dtype: the gradient vanishes. Scale the "
    "loss, or see with `eqg.gradient_flow(loss, model)` at which layers and steps it vanishes.",
    "branch not taken": "These arguments take another branch of the `cond`.",
    "not selected": "No element of it is selected for these arguments, or all of them are "
    "overwritten. Check what takes elements of the result: an index, a slice, or a maximum "
    "that is another element.",
    "canceled": "Terms of the gradient cancel exactly: for these arguments, the loss does not "
    "change to first order in this leaf.",
    "dropped by zero_safe": "It is zero because `zero_safe` drops the derivative of what a "
    "`where` does not take. `eqg.explain_nan` of this loss says where. On the boundary of a "
    "mask, such as at `x == 0`, the function may have another derivative: write it with its "
    "limit, as `eqg.safe.expm1_ratio(x)` and others are.",
    "truncated": "It is only used in steps before the last window. Use a larger `truncate`.",
    "zero value": "The derivative is zero for these arguments.",
}

# Of which the kind is that of `argmax`.
_ARGMIN = (
    "Use `eqg.ste.one_hot_argmax(-x)` and multiply by it in place of indexing. For the nearest "
    "entry of a codebook, use `eqg.ste.vector_quantize(z, codebook)` or "
    "`eqg.nn.VectorQuantizer`."
)
_INDEX = (
    "Interpolate between entries, with `i = jnp.floor(x).astype(int)` and the remainder "
    "`r = x - jnp.floor(x)`: `(1 - r) * table[i] + r * table[i + 1]`. (The derivative of "
    "`x - eqg.ste.floor(x)` is zero.)"
)
# Where the loss has functions with rules, or `stop_gradient`.
_CANCELED_WITH_RULES = (
    "Terms of the gradient cancel exactly. The loss may change in this leaf all the same, as "
    "it has functions with a rule or a `stop_gradient`: `x - eqg.ste.round(x)` has the "
    "derivative 1 - 1. For the remainder of a rounding, use `x - jnp.round(x)`."
)
# Of a `select_n` whose predicate depends on the leaf: a ReLU by hand, or a `cond` under `vmap`.
_OTHER_BRANCH = (
    "For these arguments, the `where`, or the `cond` under a `vmap`, takes the other branch. "
    "If it is a ReLU, use `jax.nn.leaky_relu(x)`."
)
# Where a function with a rule is called that is not JAX's.
_ZERO_RULE = (
    "The rule of `{name}` gives zero for these arguments. Of a surrogate, no value is near the "
    "threshold: use a wider one (`eqg.surrogates.atan()` is zero nowhere), larger inputs or a "
    "lower threshold."
)
# Of a function of `eqx_grads.safe`, and of what its derivative is made of.
_ZERO_OF_SAFE = (
    "`{name}` has the derivative zero where it has none, such as at zero. Keep its argument "
    "away from that point. If what the loss computes from `{name}` is smooth there, as "
    "`norm(x)**2` is, compute it without (`jnp.sum(x**2)`)."
)
_ROUNDED = {"round": "round", "floor": "floor", "ceil": "ceil"}


def cure_of(
    kind: str,
    primitive: str = "",
    *,
    is_index: bool = False,
    has_rules: bool = False,
    is_rule: bool = False,
    safe: str = "",
) -> str:
    """What to do.

    - `is_index`: whether the value is used as an index first of all.
    - `has_rules`: whether derivatives of the loss may be those of another function.
    - `is_rule`: whether that of this operation is.
    - `safe`: the function of `eqx_grads.safe` whose derivative is zero, if it is one.
    """
    if safe:
        return _ZERO_OF_SAFE.format(name=safe)
    if (kind, primitive) == ("dead units", "select_n"):
        return _OTHER_BRANCH
    if kind == "zero derivative" and is_rule:
        return _ZERO_RULE.format(name=primitive)
    if (kind, primitive) == ("argmax", "argmin"):
        return _ARGMIN
    if kind == "cast to an integer" and is_index:
        return _INDEX
    if kind == "canceled" and has_rules:
        return _CANCELED_WITH_RULES
    return CURES[kind].format(name=_ROUNDED.get(primitive, primitive))
