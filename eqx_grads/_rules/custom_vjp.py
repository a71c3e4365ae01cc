"""`custom_vjp`: a function with its own reverse rule, in both modes.

A `jax.custom_vjp` has no forward mode, and does not know which outputs are unused.
Here the tangent map of a call is the primitive of `linear_primitive.py`: its forward map is the
derivative of the function itself (or `def_jvp`), its transpose is the user's backward rule
(clause 3 of the contract).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import ad

from .._errors import name_of, place_of, rule_error, show_tree
from .._jaxprs.current_trace import outside_of_linearization
from .._jaxprs.operands import at, fill, restricted
from .._tangent_spaces import is_array, is_none, is_type, project_leaves
from .custom_jvp import apply_forward_rule
from .linear_primitive import linear_call, LinearMap
from .rule import (
    AbstractRules,
    advice_on_cotangents,
    check_outputs,
    check_zeros,
    Rule,
    running_rule,
    trace_rule,
)
from .signature import OURS
from .tree_split import ClosedTree, FlatCall, OutputSpec, RuleCall
from .wrapper import AbstractDecorated, check_options, decorate, P, T


class custom_vjp(AbstractDecorated[P, T]):
    """Give a function a reverse rule, usable in both modes.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.custom_vjp
        def clip_gradient(x, limit):
            return x

        @clip_gradient.def_fwd
        def clip_gradient_fwd(x, limit):
            return x, limit

        @clip_gradient.def_bwd
        def clip_gradient_bwd(limit, ct):
            return jnp.clip(ct, -limit, limit), None  # `None` is zero

        print(jax.grad(lambda x: 10 * clip_gradient(x, 1.0))(2.0))
        print(jax.jvp(lambda x: clip_gradient(x, 1.0), (2.0,), (1.0,))[1])
        ```

        ```text
        1.0
        1.0
        ```

    **Arguments:**

    - `fn`, `**options`: as for [`eqx_grads.custom_jvp`][].

    **Derivative:**

    Reverse mode calls your rules (see `def_fwd` and `def_bwd`), which need not be linear.
    Forward mode differentiates `fn` itself, or calls your `def_jvp`. Higher orders
    differentiate your rules. The backward pass keeps the residuals that `def_fwd`'s rule
    returns; under `jit`, the compiler drops arrays that only forward mode needs.

    Another rule may apply a linear function to a tangent. Reverse mode and
    `jax.linear_transpose` then call `def_fwd` and `def_bwd` of that function at zero. The
    derivative of a linear function is the same everywhere.
    """

    _rules: "ReverseRules" = eqx.field(static=True)

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod, **options: Any):
        check_options("custom_vjp", options)
        decorate(self, fn, ReverseRules())

    def def_fwd(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Define the rule for the forward pass.

        **Arguments:**

        - `rule`: called as `rule(*args, **kwargs)`, like the function, defaults included.
            Returns `out, residuals`, where `residuals` is any PyTree, with Modules and
            functions if you like. Or returns `NotImplemented`: JAX then differentiates the
            function itself, as if this call had no rule. If the rule has a keyword-only
            parameter `perturbed`, it receives a tree of Python bools: which leaves of
            `args` are being differentiated. Modules, named tuples and Python's containers
            keep their class in this tree. An object of another registered class becomes an
            object with the same attributes: `perturbed[0].weight`.

        **Returns:**

        `rule`.
        """
        self._rules.fwd_rule = Rule(rule)
        return rule

    def def_bwd(
        self, rule: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Define the rule for the backward pass. Use it as a decorator, with or without
        options.

        **Arguments:**

        - `rule`: called as `rule(residuals, ct)`. `ct` has the structure of the output, with
            `None` for all leaves that are not floating or complex. Returns a tuple with one
            cotangent for each positional argument, defaults included. Each has the
            structure of its argument, and may have `None` for any part that is zero. A
            cotangent is summed over the axes along which the argument would have broadcast,
            and cast to its dtype. The rule may have keyword-only parameters: `perturbed`, a
            tree of Python bools that says which leaves are being differentiated, and the
            keyword-only arguments of the function. Under `jax.vmap`, a rule that uses the
            name of the axis runs for each example, even if no argument is batched.
        - `symbolic_zeros`: by default the cotangents of outputs that are not used are
            arrays of zeros. With `True`, they are `None`.

        **Returns:**

        `rule`.
        """
        if rule is None:
            return lambda rule: self.def_bwd(rule, symbolic_zeros=symbolic_zeros)
        self._rules.bwd_rule = Rule(rule, symbolic_zeros)
        return rule

    def def_jvp(
        self, rule: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Give a rule for forward mode, as for [`eqx_grads.custom_jvp.def_jvp`][].

        Reverse mode goes on using `def_fwd` and `def_bwd`.
        """
        if rule is None:
            return lambda rule: self.def_jvp(rule, symbolic_zeros=symbolic_zeros)
        self._rules.set_jvp(Rule(rule, symbolic_zeros))
        return rule


_PERTURBED = "perturbed"


class ReverseRules(AbstractRules):
    def check_complete(self, fn):
        if self.fwd_rule is not None and self.bwd_rule is not None:
            return
        name, rules = name_of(fn), {"def_fwd": self.fwd_rule, "def_bwd": self.bwd_rule}
        missing = " and ".join(f"`@{name}.{of}`" for of, rule in rules.items() if rule is None)
        do = f"Define it with {missing}."
        raise rule_error(f"`{name}` has no complete reverse rule.", place_of(fn), do=do)

    def differentiate(self, call, expected):
        rule, perturbed = self.fwd_rule, call.perturbed()
        assert rule is not None
        with outside_of_linearization(call.operands):
            result = _run_fwd(call, rule, perturbed)
        if result is None:
            return _derivative_of_function(call)
        outputs, arrays, residuals = result
        check_outputs(call, rule, outputs, expected)
        indices = outputs.inexact()
        if not indices:
            return outputs, arrays, [None] * len(arrays)
        kept, kept_operands = ClosedTree.split(residuals, is_array)
        of_arrays = OutputSpec(outputs.split.without_static(), outputs.types)
        # An operand that is also a residual is stored once.
        given = [*call.operands, *kept_operands]
        stored = {id(x): x for x in given}
        places = list(map(list(stored).index, map(id, given)))
        spec = _VjpSpec(call.flat, places, perturbed, of_arrays, indices, kept)
        t_types = [outputs.types[i].to_tangent_aval() for i in indices]
        linear_map = LinearMap(call.flat.fn, spec.forward, spec.transpose, t_types)
        ts = linear_call(linear_map, [*stored.values()], [call.tangents[i] for i in perturbed])
        by_index = dict(zip(indices, ts, strict=True))
        return outputs, arrays, [by_index.get(i) for i in range(len(arrays))]


def _with_perturbed(call: RuleCall, rule: Rule, perturbed: Sequence[int], kwargs: Any) -> Any:
    """`kwargs`, and the tuple of trees of bools, which says what is being differentiated."""
    if _PERTURBED not in rule.keyword_only:
        return kwargs
    flags = [i in perturbed for i in range(call.flat.n_args)]
    return {_PERTURBED: call.flat.flags(flags, call.operands), **kwargs}


def _run_fwd(
    call: RuleCall, rule: Rule, perturbed: Sequence[int]
) -> tuple[OutputSpec, list[Any], Any] | None:
    kwargs = _with_perturbed(call, rule, perturbed, call.kwargs)
    with running_rule(call.fn, call.rules):
        result = rule(*call.args, **rule.keywords(kwargs, call.flat.filled))
    if result is NotImplemented and call.rules.convention == OURS:
        return None
    do = "Return `out, residuals`: the value, and what the backward pass needs."
    out, residuals = rule.pair(result, "The forward pass", call.fn, do)
    return *OutputSpec.of(out, call.rules.convention.outputs), residuals


def _derivative_of_function(call: RuleCall) -> tuple[OutputSpec, list[Any], list[Any]]:
    """The outputs of the function itself, their arrays, and their tangents."""
    flat, live = call.flat, call.perturbed()
    of_live = restricted(lambda *xs: flat.call(xs)[::-1], call.operands, live)
    primals, ts = at(call.operands, live), at(call.tangents, live)
    arrays, ts, outputs = jax.jvp(of_live, primals, ts, has_aux=True)
    indices = outputs.inexact()
    return outputs, arrays, fill([None] * len(arrays), indices, at(ts, indices))


@dataclasses.dataclass(eq=False)
class _VjpSpec:
    """All that is needed to push tangents forward and to pull cotangents back, but for the
    arrays. JAX keeps it with the program, so it holds no tracer."""

    flat: FlatCall
    places: list[int]  # of the operands, and then of the residuals, in what is stored
    perturbed: list[int]  # which of the positional arrays have a tangent
    outputs: OutputSpec
    out_indices: list[int]  # which of the outputs have a tangent
    kept: ClosedTree  # the residuals of the user's

    def _split(self, stored):
        """The operands, and the arrays of the residuals."""
        given = [stored[i] for i in self.places]
        n = len(given) - self.kept.n_operands
        return given[:n], given[n:]

    def forward(self, stored, live_ts):
        ts = fill([None] * self.flat.n_args, self.perturbed, live_ts)
        call = RuleCall.of(self.flat, self._split(stored)[0], ts)
        rule = call.rules.jvp_rule
        by_rule = rule is not None
        try:
            out = apply_forward_rule(rule, call) if by_rule else _derivative_of_function(call)
        except Exception as error:
            if not by_rule:  # JAX's own error does not mention forward mode, or the function
                error.add_note(
                    f"Forward mode of `{name_of(call.fn)}` differentiates the function itself "
                    f"({place_of(call.fn)}), which failed. Its backward rule is for reverse "
                    "mode. Give forward mode a rule of its own: `def_jvp` of "
                    "`eqx_grads.custom_vjp`."
                )
            raise
        pairs = zip(*(at(xs, self.out_indices) for xs in out[1:]), strict=True)
        return [jnp.zeros_like(x) if t is None else t for x, t in pairs]

    def transpose(self, stored, cts):
        operands, residuals = self._split(stored)
        call = RuleCall.of(self.flat, operands, [])
        rule = call.rules.bwd_rule
        kept = self.kept.tree(residuals)

        def pull_back(*cts):
            by_index = dict(zip(self.out_indices, cts, strict=True))
            ct = self.outputs.tree([by_index.get(i) for i in range(len(self.outputs.types))])
            ct_args = self._run_bwd(call, rule, kept, ct)
            zeros = [i for i, ct in zip(self.perturbed, ct_args, strict=True) if ct is None]
            if zeros:
                check_zeros(rule, call, zeros)
            return ct_args

        if rule.symbolic_zeros or not any(map(is_none, cts)):
            return pull_back(*cts)
        return _without_dead_terms(pull_back, cts, at(self.outputs.types, self.out_indices))

    def _run_bwd(self, call, rule, kept, ct):
        args = call.args
        kwargs = _with_perturbed(call, rule, self.perturbed, call.kwargs)
        with running_rule(call.fn, call.rules):
            result = rule(kept, ct, **rule.asked_for(kwargs))
        if not isinstance(result, tuple | list) or len(result) != len(args):
            name = name_of(call.fn)
            names = ", ".join(f"`{self.flat.names[i]}`" for i in range(len(args)))
            raise rule_error(
                f"The backward rule `{rule.name}` of `{name}` did not return one cotangent for "
                "each argument.",
                f"`{name}` has {len(args)}: {names}",
                f"the rule returned {show_tree(result)}",
                rule.place,
                do=advice_on_cotangents(result),
            )
        # Most cotangents are what they should be.
        if all(map(_fits, result, args)):
            return [result[i] for i in self.perturbed]
        operands = call.operands[: self.flat.n_args]
        types = self.flat.args.mirror(list(map(jax.typeof, operands)), arrays=operands)
        cts = []
        for i, (ct_arg, arg, type_) in enumerate(zip(result, args, types, strict=True)):
            cts.extend(_project(call.fn, rule, ct_arg, arg, type_, self.flat.names, i))
        return at(cts, self.perturbed)


def _fits(ct: Any, x: Any) -> bool:
    """Whether a cotangent is zero, or an array of the type of the array `x`. To compare arrays
    takes less time than to make their types."""
    if not isinstance(ct, jax.Array) or not isinstance(x, jax.Array):
        return ct is None and isinstance(x, jax.Array)
    if isinstance(ct, Tracer) or isinstance(x, Tracer):
        return jax.typeof(ct) == jax.typeof(x)
    return (ct.shape, ct.dtype, ct.sharding) == (x.shape, x.dtype, x.sharding)


def _project(fn, rule, ct, arg, types, names, i):
    if _fits(ct, arg):
        return [ct]

    def fail(*where, do):
        what = f"The backward rule `{rule.name}` of `{name_of(fn)}`"
        does = "returned a cotangent that does not fit its argument."
        return rule_error(f"{what} {does}", *where, rule.place, do=do)

    leaves = jax.tree.leaves(types, is_leaf=is_none)
    cts = project_leaves(ct, arg, leaves, name=names[i], fail=fail)
    return [c for c, leaf in zip(cts, leaves, strict=True) if is_type(leaf)]


def _without_dead_terms(pull_back, cts, types):
    """A backward rule without the terms of outputs that nobody used, as for forward rules. A
    rule that looks at values gets zeros for them, and so does what is not linear in it."""
    pairs = zip(cts, types, strict=True)
    zeros = [ad.zeros_like_aval(t) if ct is None else ct for ct, t in pairs]
    traced = trace_rule(pull_back, *map(jax.typeof, zeros))
    return pull_back(*zeros) if traced is None else traced.evaluate(cts)
