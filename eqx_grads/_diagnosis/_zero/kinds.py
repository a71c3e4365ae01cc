"""What kind of zero it is: from a cut in the structure, or from where a derivative ends."""

from collections.abc import Sequence, Set
from typing import Any

from ..._control_flow.truncated import TRUNCATION
from ..._jaxprs.primitives import MULTILINEAR
from ..._jaxprs.structure import CallWithRule, Cond, structure, While
from ..._rules.without_tangents import WITHOUT_TANGENTS
from ..origins import Origin
from ..source_lines import is_of_jax, is_stop_gradient
from .structure import Cut
from .walk import End


# Those of `jnp.searchsorted`, which `jax.random.choice` calls.
_SEARCHES = ("lt_to", "le_to", "SearchSorted")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
_CUTS = {
    **dict.fromkeys((*_COMPARISONS, *_SEARCHES), "comparison"),
    **dict.fromkeys(("argmax", "argmin"), "argmax"),
    **dict.fromkeys(("round", "floor", "ceil"), "rounding"),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), "order"),
    "sign": "sign",
    "convert_element_type": "cast to an integer",
    "bitcast_convert_type": "cast to an integer",
    "stop_gradient": "stop_gradient",
}
_SATURATING = frozenset("logistic tanh erf erfc exp exp2 expm1 sigmoid softplus".split())  # noqa: SIM905
# These let the derivative pass for some elements only.
_GATES = frozenset("relu relu6 max min clamp select_n reduce_max reduce_min".split())  # noqa: SIM905
_SELECTIONS = frozenset(
    """gather dynamic_slice dynamic_update_slice slice pad scatter scatter-add concatenate
    split""".split()  # noqa: SIM905
)
_SUMS = frozenset("add add_any sub reduce_sum cumsum neg".split())  # noqa: SIM905
_PRODUCTS = (*MULTILINEAR, "div", "eqg_linear")


def is_gate(origin: Origin) -> bool:
    return origin.primitive in _GATES


# Functions of JAX that consist of several operations, and their kinds.
_FUNCTIONS = {
    **dict.fromkeys(("digitize", "searchsorted"), "number of a bin"),
    **dict.fromkeys(("silu", "softplus", "log_sigmoid", "mish"), "saturated"),
    "trunc": "rounding",
    "heaviside": "comparison",
}


def function_of(
    origin: Origin, origins: Sequence[Origin], *, is_random: bool = False
) -> Origin | None:
    """The call of such a function that an equation is in, or `None`. A search for a random
    number, as in `jax.random.choice`, is no function of its own, but samples."""
    if is_random and origin.primitive in _CUTS:
        return None
    around = (origins[number] for number in origin.enclosing)
    return next((o for o in around if o.primitive in _FUNCTIONS and is_of_jax(o.eqn)), None)


def kind_of_function(call: Origin) -> str:
    return _FUNCTIONS[call.primitive]


def kind_of_cut(cut: Cut) -> str:
    """The kind of an equation that no derivative passes."""
    origin = cut.origin
    if isinstance(structure(origin.eqn), CallWithRule):
        is_solver = origin.source.library.startswith("optimistix")
        return "initial guess" if is_solver else "rule without a derivative"
    if WITHOUT_TANGENTS in str(origin.eqn.source_info.name_stack):
        return "initial guess"
    kind = _CUTS.get(origin.primitive, "no derivative")
    if cut.is_random and kind in ("argmax", "comparison"):
        is_category = kind == "argmax" or origin.primitive in _SEARCHES
        return "sampled category" if is_category else "sampled bits"
    if kind == "comparison" and cut.use == "while":
        return "predicate of a while_loop"
    return "comparison in a while_loop" if kind == "comparison" and cut.in_while else kind


def use_of_cut(cut: Cut) -> str:
    """Where the value goes that has no derivative, for the table."""
    return _USES.get(cut.use, "")


INDEX = "an index"
_USES = {
    "while": "predicate of a `while_loop`",
    "cond": "predicate of a `cond`",
    "select": "predicate of a `where`",
    "index": INDEX,
}


def has_rules(origins: Sequence[Origin]) -> bool:
    """Whether a derivative of the loss may be that of another function: it calls functions
    with a rule that is not JAX's, or `stop_gradient`."""
    return any(is_stop_gradient(o.eqn) or is_rule(o) for o in origins)


def is_rule(origin: Origin) -> bool:
    """Whether it calls a function with a rule that is not JAX's."""
    return isinstance(structure(origin.eqn), CallWithRule) and not is_of_jax(origin.eqn)


def is_truncation(origin: Origin) -> bool:
    """Whether an equation cuts the derivative between two windows of a `filter_scan`."""
    return TRUNCATION in str(origin.eqn.source_info.name_stack)


def kind_of_end(
    end: End, origin: Origin | None, decides: Set[int], leaf: int, name_of_leaf: str
) -> str:
    """The kind of an equation of a derivative where it becomes zero.

    - `origin`: the equation of the loss that this one comes from.
    - `decides`: the leaves that the predicate of that `select_n` depends on.
    - `name_of_leaf`: that of the leaf among the inputs of the loss.
    """
    name = end.eqn.primitive.name
    if origin is None or isinstance(structure(origin.eqn), While):
        return "zero value"
    if name in _SUMS:  # whatever it is the derivative of: what arrives is not zero
        return "canceled"
    if isinstance(structure(origin.eqn), Cond):
        return "branch not taken"
    if origin.primitive == "select_n":
        return "dead units" if leaf in decides else "masked"
    if origin.primitive in _GATES:
        return "dead units"
    if origin.primitive == "scatter":  # its derivative multiplies by a mask of what is kept
        return "not selected"
    if name in _PRODUCTS or end.zero_factors:
        return _kind_of_product(end, origin, name_of_leaf)
    if name in _SELECTIONS or origin.primitive in _SELECTIONS:
        return "not selected"
    return "zero value"


def _kind_of_product(end: End, origin: Origin, name_of_leaf: str) -> str:
    name = end.eqn.primitive.name
    if name == "div" or (end.overlaps and not end.cancels):
        return "underflow"
    if origin.primitive.removeprefix("safe.") in _SATURATING:
        return "saturated"
    if end.cancels:
        return "canceled"
    if name not in MULTILINEAR and not end.zero_factors:
        return "zero value"
    # A function with a rule, such as a layer, may multiply by its operands.
    by_input = any(isinstance(x, str) and x != name_of_leaf for x in end.zero_factors)
    if by_input or origin.primitive in _PRODUCTS:
        return "multiplied by zero"
    return "zero derivative"


def factor_name(source: Any, origin_of: Any) -> str:
    """What a factor is, in the user's terms."""
    if isinstance(source, str):
        return f"`{source}`"
    origin = None if source is None else origin_of(source)
    return f"the result of `{origin.primitive}` at {origin.source}" if origin else ""
