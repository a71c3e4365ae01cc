"""`elementwise`: a rule for an elementwise function, given its partial derivatives."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._errors import check_function, name_of, place_of, rule_error, show_tree, type_of
from .._jaxprs.operands import restricted
from .._tangent_spaces import broadcasts_to, is_differentiable
from ..tangents import add, is_zero
from .custom_jvp import custom_jvp
from .rule import check_function_of_zeros, Rule
from .signature import AS_CALLED


def elementwise(
    fn: Callable[..., Any] | None = None,
    derivative: Callable[..., Any] | Sequence[Any] | None = None,
    *,
    setup: Callable[..., Any] | None = None,
) -> Any:
    r"""Give an elementwise function its partial derivatives.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        # A step going forward, a smooth bump coming back.
        spike = eqg.elementwise(
            lambda v: (v > 0).astype(v.dtype),
            lambda out, v: 1 / (1 + 10 * jnp.abs(v)) ** 2,
        )
        print(spike(jnp.array(0.3)))
        print(f"{jax.grad(spike)(0.3):.4f}")

        # As a decorator. Two arguments, two partials, which share what `setup` computes.
        @eqg.elementwise(
            derivative=(lambda out, x, y, r: x * r, lambda out, x, y, r: y * r),
            setup=lambda out, x, y: 1 / out,
        )
        def hypot(x, y):
            return jnp.hypot(x, y)

        print(f"{jax.grad(hypot)(3.0, 4.0):.3f}")
        ```

        ```text
        1.0
        0.0625
        0.600
        ```

    **Arguments:**

    - `fn`: the function. Its arguments broadcast together to the shape of its one output.
    - `derivative`: called as `derivative(out, *args)`. Returns a tuple with the partial
        derivative for each argument, or the partial itself if there is one argument; `None` is
        zero. `derivative` may also be a tuple of functions `partial(out, *args)`, of which only
        the needed ones are called.
    - `setup`: called as `setup(out, *args)`. Its result is passed to `derivative`, or to each
        partial, as the last argument.

    Without `fn`, a decorator. A keyword-only argument of `fn` is also passed to each of the
    other functions that has a parameter of that name.

    **Returns:**

    An [`eqx_grads.custom_jvp`][].

    **Derivative:**

    With the partials $d_i$, the forward rule is $\dot y = \sum_i d_i\,\dot x_i$. The reverse
    rule is $\bar x_i = d_i\,\bar y$, summed over the axes along which $x_i$ was broadcast.
    Both modes; higher orders differentiate `derivative`.

    **Raises:**

    [`eqx_grads.RuleError`][] if a partial does not broadcast to the output, or is complex
    where the output is real.
    """
    if derivative is None:  # `@elementwise(lambda out, x: ...)`
        fn, derivative = None, fn
    if fn is None:
        return lambda fn: elementwise(fn, derivative, setup=setup)
    decorated = custom_jvp(fn)
    if setup is not None:
        check_function(setup, "setup", "elementwise")
    as_rule = ft.partial(Rule, conventions=_CONVENTIONS)
    partials: Any = derivative
    if isinstance(partials, tuple | list):
        partials = [as_rule(d) if callable(d) else d for d in partials]
    else:
        check_function(partials, "derivative", "elementwise")
        partials = as_rule(partials)
    shared = None if setup is None else as_rule(setup)
    rule = ft.partial(_elementwise_jvp, decorated, partials, shared)
    rules = decorated._rules
    rules.set_jvp(Rule(rule, symbolic_zeros=True, surely_linear=True))
    # `derivative` gets the arguments of the caller: a one-line partial of
    # `jax.nn.gelu` should not have to know of its `approximate`.
    rules.convention = AS_CALLED
    return decorated


_CONVENTIONS = (
    "It is called as `derivative(out, *args)`. The result of a `setup` is added last."
)


def _elementwise_jvp(decorated, derivative, setup, primals, tangents, **kwargs):
    out, fn = decorated(*primals, **kwargs), decorated.__wrapped__
    name, place = name_of(fn), place_of(fn)
    if not (eqx.is_array(out) and is_differentiable(out)):
        raise rule_error(
            f"`{name}` is elementwise, but did not return one array of floats.",
            f"it returned {show_tree(out)}",
            place,
            do="For several outputs, use `eqx_grads.custom_jvp`.",
        )
    shared = () if setup is None else (setup(out, *primals, **setup.asked_for(kwargs)),)

    def call(rule):
        return rule(out, *primals, *shared, **rule.asked_for(kwargs))

    if isinstance(derivative, Rule):
        partials = call(derivative)
        partials = partials if isinstance(partials, tuple | list) else (partials,)
    else:
        is_used = lambda i: i >= len(tangents) or not is_zero(tangents[i])
        calls = [isinstance(d, Rule) and is_used(i) for i, d in enumerate(derivative)]
        partials = [call(d) if c else d for c, d in zip(calls, derivative, strict=True)]
    if len(partials) != len(primals):
        raise rule_error(
            f"`{name}` has {len(primals)} arguments, and was given {len(partials)} partial "
            "derivatives.",
            "they are its `derivative`, or what that returned",
            place,
            do="Return one partial for each argument; `None` is zero.",
        )
    terms = []
    for i, (d, t) in enumerate(zip(partials, tangents, strict=True)):
        if is_zero(t):
            continue
        if d is not None:
            terms.append(
                _term(f"The partial derivative number {i} of `{name}`", place, d, t, out)
            )
            continue
        of_one = restricted(lambda *xs: fn(*xs, **kwargs), primals, [i])
        check_function_of_zeros("derivative", fn, of_one, [primals[i]])
    return out, add(*terms)


def _term(what, place, partial, t, out):
    partial = jnp.asarray(partial)
    if not broadcasts_to(t.shape, out.shape) or not broadcasts_to(partial.shape, out.shape):
        raise rule_error(
            f"{what} does not broadcast to the output.",
            f"the output is {type_of(out)}, the partial {type_of(partial)}, "
            f"the argument's tangent {type_of(t)}",
            place,
            do="An elementwise function acts on each element by itself. For others, use "
            "`eqx_grads.custom_jvp`.",
        )
    if (jnp.iscomplexobj(partial) or jnp.iscomplexobj(t)) and not jnp.iscomplexobj(out):
        raise rule_error(
            f"{what} gives a complex tangent to a real output.",
            place,
            do="A real function of a complex variable has no single partial derivative: "
            "use `eqx_grads.custom_jvp`.",
        )
    partial = jnp.broadcast_to(partial.astype(out.dtype), out.shape)
    return partial * jnp.broadcast_to(t.astype(out.dtype), out.shape)
