"""What both decorators share: a function with rules, as Python and as JAX see it.

Python sees a good citizen (clause 9 of the contract): name, signature, docstring, methods,
copies, pickles. JAX sees a `jax.custom_jvp` of a list of arrays. The Equinox wrappers are
not underneath: their `filter_custom_jvp` takes functions of operands only (clause 4), has
no static outputs (clause 7) and no keyword for a positional parameter (clause 1), and
`filter_custom_vjp` has no forward mode (clause 3).
"""

import abc
import functools as ft
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._calls import (
    as_array_list,
    as_arrays,
    is_eager,
    is_inexact,
    Outputs,
    ParameterNames,
    Recipe,
    Signature,
)
from ._closures import holds_nothing
from ._errors import name_of, place_of, rule_error, show_tree
from ._rules import check_outputs, Rule, RuleCall
from ._vmap_call import vmap_call, VmapCall


P = ParamSpec("P")
T = TypeVar("T")


class AbstractDecorated(eqx.Module, Generic[P, T]):
    """A function with rules of its own."""

    fn: eqx.AbstractVar[Callable[..., Any]]
    vmap_rule: eqx.AbstractVar[Rule | None]
    binding: eqx.AbstractVar[str]

    @abc.abstractmethod
    def rules(self) -> list[Rule | None]:
        """All rules, given or not."""

    @abc.abstractmethod
    def check_complete(self) -> None:
        """Raise if a rule is missing."""

    @abc.abstractmethod
    def differentiate(self, call: RuleCall) -> tuple[Outputs, list[Any], list[Any]]:
        """The outputs, their arrays, and the tangents of these (`None` for zero)."""

    @abc.abstractmethod
    def primal_rule(self) -> Rule:
        """The rule that also returns the value."""

    @property
    def __wrapped__(self):
        return self.fn

    @property
    def _signature(self) -> Signature:
        found = self.__dict__.get("_signature_cache")
        if found is None:
            found = Signature(self.fn)
            object.__setattr__(self, "_signature_cache", found)
        return found

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check_complete()
        signature = self._signature
        args_, kwargs_, filled = signature.bind(args, kwargs)
        if is_eager() and not _any_tracers(args_, kwargs_):
            return as_arrays(self.fn(*as_arrays(args_), **kwargs_))
        fns = [self.fn, *(rule.fn for rule in self.rules() if rule is not None)]
        roots = [fn for fn in fns if not holds_nothing(fn)]
        recipe, operands = Recipe.of(self, roots, args_, kwargs_, filled)
        return _transformable_call(recipe, signature.names, operands)

    def __get__(self, instance: Any, owner: Any = None):
        if self.binding == "static" or (instance is None and self.binding != "class"):
            return self
        if self.binding == "class":
            return eqx.Partial(self, owner if instance is None else type(instance))
        return eqx.Partial(self, instance)

    def __reduce__(self):
        # Like a function: by reference where it has a name to refer to. Its own function
        # can't be pickled in any other way, as its name leads to `self`.
        module = sys.modules.get(self.fn.__module__) if _is_named(self.fn) else None
        try:
            found = ft.reduce(getattr, self.fn.__qualname__.split("."), module)
        except AttributeError:
            found = None
        if found is self:
            return self.fn.__qualname__
        return object.__reduce_ex__(self, 2)

    def __repr__(self):
        return f"<eqx_grads.{type(self).__name__} of {name_of(self.fn)}>"

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the call a batching rule of its own.

        It is applied to the call itself, before differentiation: `grad(vmap(f))`
        differentiates what the rule calls. Without one, `vmap` batches the derivative
        rules, which for an argument that is not batched (a weight) means one cotangent per
        example, summed afterwards.

        !!! example

            ```python
            import eqx_grads as eqg
            import jax
            import jax.numpy as jnp

            @eqg.custom_jvp
            def linear(weight, x):
                return x @ weight.T

            @linear.def_jvp
            def linear_jvp(primals, tangents):
                weight, x = primals
                t_weight, t_x = tangents
                return linear(weight, x), x @ t_weight.T + t_x @ weight.T

            @linear.def_vmap
            def linear_vmap(axis_size, batched, weight, x):
                if batched == (False, True):
                    return linear(weight, x), True  # one product for the whole batch
                axes = (0 if batched[0] else None, 0 if batched[1] else None)
                return jax.vmap(lambda w, x: w @ x, axes)(weight, x), True

            weight, xs = jnp.ones((2, 3)), jnp.ones((5, 3))
            assert jax.vmap(linear, in_axes=(None, 0))(weight, xs).shape == (5, 2)
            ```

        **Arguments:**

        - `rule`: called as `rule(axis_size, batched, *args, **kwargs)`. `batched` is a tuple
            with one entry for each positional argument: the argument's tree with Python
            bools for leaves (just a bool if it is an array). Batched leaves have the batch
            axis in front. Returns `out, out_batched`, the second being a bool or a tree
            of bools which is a prefix of `out`.

        **Returns:**

        `rule`.
        """
        object.__setattr__(self, "vmap_rule", Rule(rule))
        return rule


def set_metadata(decorated: Any) -> None:
    """Name, docstring and the rest, as `functools.update_wrapper` would copy them."""
    # Equinox carries these names through `tree_flatten`.
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        value = getattr(decorated.fn, name, None)
        if value is not None:
            object.__setattr__(decorated, name, value)


def unwrap_method(fn: Any) -> tuple[Callable[..., Any], str]:
    """The function, and how it binds as an attribute of a class."""
    if isinstance(fn, staticmethod):
        return fn.__func__, "static"
    if isinstance(fn, classmethod):
        return fn.__func__, "class"
    if not callable(fn):
        raise rule_error(
            "A rule was asked for something that can't be called.",
            f"it is a `{type(fn).__qualname__}`",
            do="Decorate a function, a method or a callable Module.",
        )
    return fn, "method"


def _is_named(fn) -> bool:
    return isinstance(fn, types.FunctionType) and "<locals>" not in fn.__qualname__


def _any_tracers(args, kwargs) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))


def _transformable_call(recipe: Recipe, names: ParameterNames, operands: Sequence[Any]):
    """Call by way of JAX, so that transformations see the rules.

    What is defined in here outlives the call, so it may refer to `recipe`, but never to
    `operands`.
    """
    name = name_of(recipe.holder.fn)
    # Whoever runs first (the function or a rule, depending on the transformation) leaves
    # here what is not an array; later runs are held to it.
    box: list[Outputs] = []

    def primal(*operands):
        decorated, args, kwargs = recipe.restore(as_array_list(operands))
        outputs, arrays = Outputs.of(decorated.fn(*args, **kwargs))
        box[:] = [outputs]
        return arrays

    def jvp(primals, tangents):
        call = _rule_call(recipe, names, as_array_list(primals), tangents)
        if call.live():
            outputs, arrays, t_arrays = call.decorated.differentiate(call)
            check_outputs(call, call.decorated.primal_rule(), outputs, box)
        else:  # JAX counts integers as perturbed in places
            outputs, arrays = Outputs.of(call.decorated.fn(*call.args, **call.kwargs))
            t_arrays = [None] * len(arrays)
        box[:] = [outputs]
        return arrays, [
            SymbolicZero(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(arrays, t_arrays, strict=True)
        ]

    primal.__name__, jvp.__name__ = name, f"{name}_jvp"
    plain = jax.custom_jvp(primal)
    plain.defjvp(jvp, symbolic_zeros=True)
    if recipe.holder.vmap_rule is None:
        return _first(plain(*operands), box)
    vmap = ft.partial(_vmap, recipe, plain, box)
    return _first(vmap_call(VmapCall(name, primal, jvp, vmap), operands), box)


def _first(arrays, box):
    return box[0].tree(arrays)


def _rule_call(recipe, names, operands, tangents) -> RuleCall:
    ts = [
        None if isinstance(t, SymbolicZero) or not is_inexact(x) else jnp.asarray(t)
        for x, t in zip(operands, tangents, strict=True)
    ]
    decorated, args, kwargs = recipe.restore(operands)
    for i in range(recipe.n_args, len(ts)):
        if ts[i] is not None:
            raise _not_differentiable(decorated.fn, recipe, names, i)
    return RuleCall(decorated, args, kwargs, operands, ts[: recipe.n_args], recipe, names)


def _not_differentiable(fn, recipe, names, i):
    name, leaf = name_of(fn), recipe.path(i, names)
    if i < recipe.n_args + recipe.n_kwargs:
        return rule_error(
            f"`{name}` was differentiated with respect to a keyword-only argument.",
            f"at {leaf}",
            place_of(fn),
            do="Keyword-only arguments are configuration. Make it a positional parameter "
            "to give it a derivative, or pass `jax.lax.stop_gradient` of it.",
        )
    return rule_error(
        f"`{name}` was differentiated with respect to a value that it closes over.",
        f"at {leaf}",
        place_of(fn),
        do="A rule gives derivatives with respect to arguments. Make the value a "
        "positional parameter, or close over `jax.lax.stop_gradient` of it.",
    )


def _vmap(recipe, plain, box, axis_data, batched, *operands):
    """The user's batching rule, flat."""
    n = recipe.n_args
    if any(batched[n:]):
        # It knows of positional arguments only. Batch the derivative rules instead.
        in_axes = [0 if b else None for b in batched]
        out = jax.vmap(
            plain,
            in_axes,
            axis_size=axis_data.size,
            axis_name=axis_data.name,
            spmd_axis_name=axis_data.spmd_name,
        )(*operands)
        return out, [True] * len(out)
    decorated, args, kwargs = recipe.restore(as_array_list(operands))
    rule = decorated.vmap_rule
    flags = recipe.args.tree(batched[:n], [False] * len(recipe.args.static))
    result = rule.fn(axis_data.size, flags, *args, **kwargs)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name_of(decorated.fn)}` did not "
            "return a pair.",
            f"it returned {show_tree(result)}",
            rule.place,
            do="Return `out, out_batched`.",
        )
    outputs, arrays = Outputs.of(result[0])
    try:
        out_batched = _broadcast_prefix(result[1], result[0])
    except ValueError as error:
        raise rule_error(
            f"The batching rule `{rule.name}` of `{name_of(decorated.fn)}` did not "
            "say which of its outputs are batched.",
            f"the outputs are {show_tree(result[0])}, `out_batched` is {result[1]}",
            rule.place,
            do="`out_batched` is a bool, or a tree of bools that is a prefix of the output.",
        ) from error
    flat_batched = [out_batched[i] for i in outputs.rest.places]
    box[:] = [outputs]
    return arrays, flat_batched


def _broadcast_prefix(prefix, tree) -> list[bool]:
    filled = jax.tree.map(
        lambda flag, branch: jax.tree.map(lambda _: bool(flag), branch), prefix, tree
    )
    return jax.tree.leaves(filled)
