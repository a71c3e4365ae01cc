"""The decorator for forward rules."""

import contextvars
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._errors import name_of, place_of, rule_error, show_tree, type_of
from .._jaxprs.linearity import output_statuses, why_nonlinear
from .._tangent_spaces import DoesNotFit, match_leaves, tangent_leaf
from .call import AbstractDefinition
from .flatten_call import is_inexact, Outputs, trace_state
from .rule import CallWatch, NEEDS_VALUES, Rule, RuleCall, Seen
from .wrapper import AbstractDecorated, P, set_metadata, T, unwrap_method


class custom_jvp(AbstractDecorated[P, T]):
    """A function with a forward rule of its own.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.custom_jvp
        def log1pexp(x):
            return jnp.logaddexp(x, 0.0)

        @log1pexp.def_jvp
        def log1pexp_jvp(primals, tangents):
            (x,) = primals
            (t_x,) = tangents
            return log1pexp(x), jax.nn.sigmoid(x) * t_x

        assert jax.grad(log1pexp)(0.0) == 0.5
        assert jax.hessian(log1pexp)(0.0) == 0.25
        ```

    **Arguments:**

    - `fn`: a function, a method, or any callable PyTree. What can be passed by position can
        be differentiated, leaf by leaf, however deep in a PyTree or Module (`self`
        included); it makes no difference if it is passed by keyword. Keyword-only
        parameters are configuration: differentiating one is an error.

    A traced value that `fn` or its rule closes over is passed along for you.

    **Derivative:**

    The forward rule is yours (see `def_jvp`). The reverse rule is
    its transpose, so the rule has to be linear in its tangents; a rule that is seen not to
    be is an error. Both modes and all orders are available, the higher ones by
    differentiating your rule.
    """

    _definition: "_ForwardDefinition"
    _binding: str = eqx.field(static=True)

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod):
        fn, self._binding = unwrap_method(fn)
        self._definition = _ForwardDefinition(fn)
        set_metadata(self, fn)

    def def_jvp(
        self, rule: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Give the forward rule. Use it as a decorator, with or without options.

        **Arguments:**

        - `rule`: called as `rule(primals, tangents, **kwargs)`. `primals` is the tuple of
            all positional arguments, `tangents` that of their tangents, of the same
            structure: arrays where the primal is floating or complex, `None` for all other
            leaves. Returns `out, t_out`. `t_out` is like `out`, with `None` for any part
            that is zero.
        - `symbolic_zeros`: by default all tangents are arrays, and the terms of arguments
            that are not being differentiated are dropped from the answer, whatever their
            value. With `True`, such tangents are `None`, and the rule may skip the work.
            `eqx_grads.tangents` has arithmetic for them.

        **Returns:**

        `rule`.
        """
        if rule is None:
            return lambda rule: self.def_jvp(rule, symbolic_zeros=symbolic_zeros)
        self._definition.jvp_rule = Rule(rule, symbolic_zeros)
        self._definition.seen = Seen()
        return rule


class _ForwardDefinition(AbstractDefinition):
    def __init__(self, fn):
        AbstractDefinition.__init__(self, fn, batches_alike=False)
        self.jvp_rule: Rule | None = None

    def primal_rule(self):
        assert self.jvp_rule is not None
        return self.jvp_rule

    def check_complete(self):
        if self.jvp_rule is None:
            name = name_of(self.fn)
            raise rule_error(
                f"`{name}` has no forward rule.",
                place_of(self.fn),
                do=f"Define one with `@{name}.def_jvp`.",
            )

    def differentiate(self, call):
        return apply_forward_rule(self.primal_rule(), call)


def apply_forward_rule(
    rule: Rule, call: RuleCall, drop: bool = True
) -> tuple[Outputs, list[Any], list[Any]]:
    """Call a forward rule: the outputs, their arrays, and their tangents (`None`: zero).

    `drop`: whether to drop the terms of what is not being differentiated.
    """
    live = call.live()
    inexact = [i for i, x in enumerate(call.operands[: len(call.tangents)]) if is_inexact(x)]
    keywords = call.keywords(rule)

    def tangent_map(places, given):
        ts: list[Any] = [None] * len(call.tangents)
        if not rule.symbolic_zeros:
            for i in inexact:
                ts[i] = jnp.zeros_like(call.operands[i])
        for i, t in zip(places, given, strict=True):
            ts[i] = t
        t_args = call.recipe.args.only(ts)
        return _take_result(call, rule, rule.fn(call.args, t_args, **keywords))

    applies_itself = False
    if not rule.surely_linear:
        # With symbolic zeros a rule may be another one for each pattern of zeros.
        checked = live if rule.symbolic_zeros else inexact
        check = ft.partial(_check_linear, call, rule, tangent_map, checked)
        applies_itself = call.definition.seen.once(call, ("linear", *checked), check)
    live_ts = [call.tangents[i] for i in live]
    if rule.symbolic_zeros or live == inexact or not drop or is_dropping(call, applies_itself):
        return tangent_map(live, live_ts)
    entry = (call.definition.seen, trace_state())
    token = _DROPPING.set((*_DROPPING.get(), entry))
    try:
        return _drop_dead_terms(ft.partial(tangent_map, live), live_ts)
    finally:
        _DROPPING.reset(token)


# The functions whose dead terms are being dropped, and the trace in which that was begun.
_DROPPING: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "eqx_grads_dropping", default=()
)


_DEEPEST = 3


def is_dropping(call: RuleCall, applies_itself: bool = False) -> bool:
    """Whether this is a call of the rule by way of itself.

    A rule may apply its own function to a tangent: `f(t_x, y) + f(x, t_y)`. To drop dead
    terms is to differentiate that in turn, and to drop dead terms there as well would never
    end. Such a call runs in the trace in which the dropping was begun; the other calls that
    a rule makes of its own function (for the value, differentiated at a higher order) run
    further out. Of a call inside a `jit` or a loop that can't be told, so if the rule
    makes any of these, no terms are dropped on the way. What is missed ends at `_DEEPEST`.
    """
    states = [state for seen, state in _DROPPING.get() if seen is call.definition.seen]
    if len(states) >= _DEEPEST:
        return True
    return bool(states) and (applies_itself or trace_state() in states)


def _drop_dead_terms(tangent_map, live_ts):
    """Differentiate the rule at zero: being linear, it is its own derivative, and JAX drops
    what is not multiplied by a live tangent (clause 2 of the contract)."""
    moves: list[bool] = []
    static: list[Any] = []

    def of_live(live_ts):
        outputs, arrays, t_arrays = tangent_map(live_ts)
        static[:] = [outputs, [t is not None for t in t_arrays]]
        watched = [t for t in t_arrays if t is not None]
        moves[:] = [False] * len(watched)
        return _watch(watched, moves), arrays

    zeros = [jnp.zeros_like(t) for t in live_ts]
    _, moved, arrays = jax.jvp(of_live, (zeros,), (live_ts,), has_aux=True)
    outputs, present = static
    answers = iter(t if moving else None for t, moving in zip(moved, moves, strict=True))
    return outputs, arrays, [next(answers) if p else None for p in present]


def _watch(xs, moves):
    """The identity, which notes for each of `xs` whether it is being perturbed."""
    if not xs:
        return xs

    @jax.custom_jvp
    def watch(xs):
        return xs

    def watch_jvp(primals, tangents):
        ((xs,), (ts,)) = primals, tangents
        moves[:] = [not isinstance(t, SymbolicZero) for t in ts]
        return xs, ts

    watch.defjvp(watch_jvp, symbolic_zeros=True)
    return watch(xs)


def _check_linear(call, rule, tangent_map, places) -> bool:
    """Raise if the rule is seen not to be linear in the tangents at these places.

    Returns whether the rule calls its own function inside a `jit`, a loop or a `vmap`.
    """
    types = [jax.typeof(call.operands[i]).to_tangent_aval() for i in places]
    watch: list[CallWatch] = []

    def of_tangents(*ts):
        watch[:] = [CallWatch(call.definition.seen, trace_state())]
        with watch[0]:
            return [t for t in tangent_map(places, ts)[2] if t is not None]

    try:
        jaxpr = jax.make_jaxpr(of_tangents)(*types)
    except NEEDS_VALUES:  # an eager rule that looks at values: nothing is seen
        return False
    reason = why_nonlinear(output_statuses(jaxpr))
    if reason is not None:
        name = name_of(call.definition.fn)
        raise rule_error(
            f"The forward rule `{rule.name}` of `{name}` is not linear in its tangents: "
            f"{reason}.",
            rule.place,
            do="A derivative is a linear map: every term has exactly one tangent in it, "
            "multiplied by something that depends on primals only. A non-linear map of "
            "gradients (clipping, say) is a backward rule: use `eqx_grads.custom_vjp`.",
        )
    return watch[0].called_inside


def _take_result(call, rule, result) -> tuple[Outputs, list[Any], list[Any]]:
    fn = call.definition.fn
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise rule_error(
            f"The forward rule `{rule.name}` of `{name_of(fn)}` did not return a pair.",
            f"it returned {show_tree(result)}",
            rule.place,
            do="Return `out, t_out`: the value and its tangent.",
        )
    out, t_out = result
    outputs, arrays = Outputs.of(out)

    def fail(*where, do):
        return rule_error(
            f"The forward rule `{rule.name}` of `{name_of(fn)}` returned a tangent that "
            "does not fit its output.",
            *where,
            rule.place,
            do=do,
        )

    ts = match_leaves(t_out, out, "out", fail)
    is_none = lambda x: x is None
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_none)
    t_leaves = []
    for (path, leaf), t in zip(paths_and_leaves, ts, strict=True):
        try:
            t_leaf = tangent_leaf(t, leaf)
        except DoesNotFit as misfit:
            where = "out" + jax.tree_util.keystr(path)
            raise fail(
                f"at {where}: the output is {type_of(leaf)}, the tangent is {type_of(t)}",
                do=str(misfit),
            ) from None
        if leaf is not None:
            t_leaves.append(t_leaf)
    return outputs, arrays, [t_leaves[i] for i in outputs.rest.places]
