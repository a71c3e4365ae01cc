"""The decorator for reverse rules. Forward mode works all the same.

A `jax.custom_vjp` has no forward mode, and is told nothing of the outputs that nobody uses.
So this is a `jax.custom_jvp` whose tangent map is the primitive of `linear_primitive.py`: its
forward map is the derivative of the function itself (or `def_jvp`), its transpose is the
user's backward rule (clause 3 of the contract).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import AbstractValue

from .._errors import name_of, place_of, rule_error, show_tree
from .._jaxprs.linearity import output_statuses, surely_linear
from .._tangent_spaces import as_array_list, project_leaves
from .call import AbstractDefinition
from .closure_convert import hoist, Hollow
from .custom_jvp import apply_forward_rule, is_dropping
from .flatten_call import is_array, Outputs, ParameterNames, Recipe, Rest
from .linear_primitive import linear_call, LinearMap
from .rule import NEEDS_VALUES, Rule, RuleCall, Seen
from .wrapper import AbstractDecorated, P, set_metadata, T, unwrap_method


class custom_vjp(AbstractDecorated[P, T]):
    """A function with a reverse rule of its own, usable in both modes.

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

        assert jax.grad(lambda x: 10 * clip_gradient(x, 1.0))(2.0) == 1.0
        assert jax.jvp(lambda x: clip_gradient(x, 1.0), (2.0,), (1.0,))[1] == 1.0
        ```

    **Arguments:**

    - `fn`: as for [`eqx_grads.custom_jvp`][].

    **Derivative:**

    The reverse rule is yours (see `def_fwd` and `def_bwd`). It need not be linear. Forward
    mode is the derivative of `fn` itself, or what you give with `def_jvp`. Higher orders
    differentiate your rules. What is kept for the backward pass is what `def_fwd`'s rule
    returned; arrays that only forward mode needs are dropped by the compiler under `jit`.
    """

    _definition: "_ReverseDefinition"
    _binding: str = eqx.field(static=True)

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod):
        fn, self._binding = unwrap_method(fn)
        self._definition = _ReverseDefinition(fn)
        set_metadata(self, fn)

    def def_fwd(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the rule for the forward pass.

        **Arguments:**

        - `rule`: called as `rule(*args, **kwargs)`, like the function. Returns
            `out, residuals`, where `residuals` is any PyTree (Modules and functions may be
            in it). If it has a keyword-only parameter `perturbed`, it is given the tree of
            Python bools that says which leaves of `args` are being differentiated.

        **Returns:**

        `rule`.
        """
        self._definition.fwd_rule = Rule(rule)
        return rule

    def def_bwd(
        self, rule: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Give the rule for the backward pass. Use it as a decorator, with or without
        options.

        **Arguments:**

        - `rule`: called as `rule(residuals, ct)`, where `ct` is like the output, with
            `None` for all leaves that are not floating or complex. Returns a tuple with one
            cotangent for each positional argument, each like the argument, with `None` for
            any part that is zero. A cotangent is summed over the axes along which the
            argument would have broadcast, and cast to its dtype. If the rule has a
            keyword-only parameter `perturbed`, it is given the tree of Python bools that
            says which leaves are being differentiated; likewise it may ask for the
            function's keyword-only arguments by name.
        - `symbolic_zeros`: by default the cotangents of outputs that are not used are
            arrays of zeros. With `True`, they are `None`.

        **Returns:**

        `rule`.
        """
        if rule is None:
            return lambda rule: self.def_bwd(rule, symbolic_zeros=symbolic_zeros)
        self._definition.bwd_rule = Rule(rule, symbolic_zeros)
        return rule

    def def_jvp(
        self, rule: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Give a rule for forward mode, as for [`eqx_grads.custom_jvp.def_jvp`][].

        Reverse mode goes on using `def_fwd` and `def_bwd`.
        """
        if rule is None:
            return lambda rule: self.def_jvp(rule, symbolic_zeros=symbolic_zeros)
        self._definition.jvp_rule = Rule(rule, symbolic_zeros)
        self._definition.seen = Seen()
        return rule


class _ReverseDefinition(AbstractDefinition):
    def __init__(self, fn):
        AbstractDefinition.__init__(self, fn, batches_alike=True)
        self.fwd_rule: Rule | None = None
        self.bwd_rule: Rule | None = None
        self.jvp_rule: Rule | None = None

    def primal_rule(self):
        assert self.fwd_rule is not None
        return self.fwd_rule

    def check_complete(self):
        missing = [
            f"`@{name_of(self.fn)}.{name}`"
            for name, rule in (("def_fwd", self.fwd_rule), ("def_bwd", self.bwd_rule))
            if rule is None
        ]
        if missing:
            raise rule_error(
                f"`{name_of(self.fn)}` has no reverse rule, or half of one.",
                place_of(self.fn),
                do=f"Define it with {' and '.join(missing)}.",
            )

    def differentiate(self, call):
        outputs, arrays, residuals = _run_fwd(call)
        places = outputs.inexact()
        t_arrays: list[Any] = [None] * len(arrays)
        if not places:
            return outputs, arrays, t_arrays
        res_rest, res_arrays = Rest.split(residuals, is_array)
        hollow, captured = hoist(res_rest.static)
        res_rest.static = hollow.items
        tape = _Tape(
            recipe=call.recipe,
            names=call.names,
            live=tuple(call.live()),
            arg_types=[jax.typeof(x) for x in call.operands[: call.recipe.n_args]],
            out_rest=outputs.rest.bare(),
            out_types=[jax.typeof(x) for x in arrays],
            places=places,
            res_rest=res_rest,
            res_hollow=hollow,
            n_operands=len(call.operands),
            n_residuals=len(res_arrays),
            drop=not is_dropping(call),
        )
        linear_map = LinearMap(
            name_of(call.definition.fn),
            tape.forward,
            tape.transpose,
            [tape.out_types[i].to_tangent_aval() for i in places],
        )
        residuals = [*call.operands, *res_arrays, *captured]
        ts = linear_call(linear_map, residuals, [call.tangents[i] for i in tape.live])
        for i, t in zip(places, ts, strict=True):
            t_arrays[i] = t
        return outputs, arrays, t_arrays


def _perturbed(recipe: Recipe, live: Sequence[int]):
    """The tuple of trees of bools: which leaves are being differentiated."""
    flags = [i in live for i in range(recipe.n_args)]
    return recipe.args.tree(flags, [False] * len(recipe.args.static))


def _run_fwd(call: RuleCall) -> tuple[Outputs, list[Any], Any]:
    rule = call.definition.fwd_rule
    offered = rule.asked_for({"perturbed": _perturbed(call.recipe, call.live())})
    result = rule.fn(*call.args, **{**offered, **call.keywords(rule)})
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise rule_error(
            f"The forward rule `{rule.name}` of `{name_of(call.definition.fn)}` did not "
            "return a pair.",
            f"it returned {show_tree(result)}",
            rule.place,
            do="Return `out, residuals`: the value, and what the backward pass needs.",
        )
    outputs, arrays = Outputs.of(result[0])
    return outputs, arrays, result[1]


@dataclasses.dataclass(frozen=True)
class _Tape:
    """All that is needed to push tangents forward and to pull cotangents back, but for the
    arrays. JAX keeps it with the program, so there is no tracer in it."""

    recipe: Recipe
    names: ParameterNames
    live: tuple[int, ...]  # which of the positional arrays have a tangent
    arg_types: list[Any]
    out_rest: Rest
    out_types: list[Any]
    places: list[int]  # which of the outputs have a tangent
    res_rest: Rest
    res_hollow: Hollow
    n_operands: int
    n_residuals: int
    # Whether the forward rule may drop dead terms: not where it was called while its own were
    # being dropped. The map may run much later, when nothing else remembers that.
    drop: bool

    def forward(self, residuals, live_ts):
        residuals, live_ts = as_array_list(residuals), as_array_list(live_ts)
        operands = residuals[: self.n_operands]
        definition, args, kwargs = self.recipe.restore(operands)
        if definition.jvp_rule is None:
            return self._forward_of_function(operands, live_ts)
        ts: list[Any] = [None] * self.recipe.n_args
        for i, t in zip(self.live, live_ts, strict=True):
            ts[i] = t
        call = RuleCall(definition, args, kwargs, operands, ts, self.recipe, self.names)
        _, arrays, t_out = apply_forward_rule(definition.jvp_rule, call, self.drop)
        return [
            jnp.zeros_like(arrays[i]) if t_out[i] is None else t_out[i] for i in self.places
        ]

    def _forward_of_function(self, operands, live_ts):
        def of_live(xs):
            full = list(operands)
            for i, x in zip(self.live, xs, strict=True):
                full[i] = x
            definition, args, kwargs = self.recipe.restore(full)
            _, arrays = Outputs.of(definition.fn(*args, **kwargs))
            return [arrays[i] for i in self.places]

        primals = [operands[i] for i in self.live]
        return jax.jvp(of_live, (primals,), (list(live_ts),))[1]

    def transpose(self, residuals, cts):
        # JAX hands over a constant as the Python or NumPy number that it once was.
        residuals = as_array_list(residuals)
        cts = [None if ct is None else jnp.asarray(ct) for ct in cts]
        definition, _, kwargs = self.recipe.restore(residuals[: self.n_operands])
        end = self.n_operands + self.n_residuals
        # Functions among the residuals may have held traced values.
        static, _ = self.res_hollow.fill(residuals[end:])
        kept = self.res_rest.tree(residuals[self.n_operands : end], static)
        live_cts = [i for i, ct in zip(self.places, cts, strict=True) if ct is not None]
        all_live = len(live_cts) == len(self.places)

        def pull_back(live):
            full: list[Any] = [None] * len(self.out_types)
            if not definition.bwd_rule.symbolic_zeros:
                for i in self.places:
                    full[i] = jnp.zeros(self.out_types[i].shape, self.out_types[i].dtype)
            for i, ct in zip(live_cts, live, strict=True):
                full[i] = ct
            return self._run_bwd(definition, kwargs, kept, self.out_rest.tree(full))

        live = [ct for ct in cts if ct is not None]
        if (
            all_live
            or definition.bwd_rule.symbolic_zeros
            or not _surely_linear(pull_back, live)
        ):
            return pull_back(live)
        # The outputs that nobody used are multiplied by zero: as for forward rules, the
        # derivative at zero is the same without these terms.
        zeros = [jnp.zeros_like(ct) for ct in live]
        return jax.jvp(pull_back, (zeros,), (live,))[1]

    def _run_bwd(self, definition, kwargs, kept, ct):
        rule, fn = definition.bwd_rule, definition.fn
        offered = {"perturbed": _perturbed(self.recipe, self.live), **kwargs}
        result = rule.fn(kept, ct, **rule.asked_for(offered))
        args = self.recipe.args.tree(self.arg_types)
        if not isinstance(result, tuple | list) or len(result) != len(args):
            raise rule_error(
                f"The backward rule `{rule.name}` of `{name_of(fn)}` did not return one "
                "cotangent for each argument.",
                f"`{name_of(fn)}` has {len(args)}: "
                + ", ".join(f"`{self.names[i]}`" for i in range(len(args))),
                f"the rule returned {show_tree(result)}",
                rule.place,
                do="Return a tuple, also for a single argument: `return (ct,)`. "
                "`None` is zero.",
            )
        cts = []
        for i, (ct_arg, arg) in enumerate(zip(result, args, strict=True)):
            name = self.names[i]
            cts.extend(self._project(definition, ct_arg, arg, name))
        return [cts[i] for i in self.live]

    def _project(self, definition, ct, arg, name):
        def fail(*where, do):
            rule, fn = definition.bwd_rule, definition.fn
            return rule_error(
                f"The backward rule `{rule.name}` of `{name_of(fn)}` returned a "
                "cotangent that does not fit its argument.",
                *where,
                rule.place,
                do=do,
            )

        leaves = jax.tree.leaves(arg, is_leaf=lambda x: x is None)
        cts = project_leaves(ct, arg, leaves, name=name, fail=fail)
        return [c for c, leaf in zip(cts, leaves, strict=True) if _is_type(leaf)]


def _is_type(leaf) -> bool:
    return isinstance(leaf, AbstractValue)


def _surely_linear(pull_back, live) -> bool:
    try:
        jaxpr = jax.make_jaxpr(lambda cts: [c for c in pull_back(cts) if c is not None])(live)
    except NEEDS_VALUES:  # an eager rule that looks at values
        return False
    return surely_linear(output_statuses(jaxpr))
