"""`jax_custom_jvp`: called as `jax.custom_jvp` is, on the rules of this library."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from .. import tangents
from .._errors import check_function, name_of
from .._rules.custom_jvp import ForwardRules
from .._rules.rule import Rule
from .._rules.wrapper import P, T
from .._tangent_spaces import is_arraylike, is_none
from .jax_decorated import AbstractJaxDecorated


class jax_custom_jvp(AbstractJaxDecorated[P, T]):
    """Replace `jax.custom_jvp`, with the rules of this library: change `jax.custom_jvp` to
    `eqg.jax_custom_jvp`, and leave the rest unchanged.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.jax_custom_jvp
        def f(x, y):
            return jnp.sin(x) * y

        @f.defjvp
        def f_jvp(primals, tangents):
            x, y = primals
            t_x, t_y = tangents
            return f(x, y), jnp.cos(x) * y * t_x + jnp.sin(x) * t_y

        print(jax.grad(f)(0.0, 3.0))
        ```

        ```text
        3.0
        ```

    Code for `jax.custom_jvp` works in the same way, with these exceptions:

    - The library does not compute the terms of arguments that are not being differentiated.
        JAX multiplies these terms by zeros, and the product is NaN where the factor is NaN.
    - Python and NumPy integers stay what they are; in JAX they are arrays under `jit`.

    These work too: traced values that the function, its rules or the arguments of
    `nondiff_argnums` close over. Arguments may have leaves that are not arrays, such as an
    `eqx.Module`; their tangents are `None` there. The flag `jax_custom_jvp3` is accepted.

    **Arguments:**

    - `fun`: a function. As in JAX, it does not bind as a method.
    - `nondiff_argnums`, `nondiff_argnames`: the positions, or the names, of arguments that
        are not differentiated. A rule gets them first. Their derivative is zero.

    **Derivative:**

    The forward rule is yours (see `defjvp`). The reverse rule is its transpose. Both modes and
    all orders are available. For higher orders, JAX differentiates your rule. Unlike
    [`eqx_grads.custom_jvp`][], this decorator accepts a rule that is not linear in its
    tangents: forward mode returns what the rule returns.
    """

    mode, how, stops = "JVP", "@{}.defjvp", True
    new_rules, unset = ForwardRules, {"jvp": None}

    def defjvp(
        self, jvp: Callable[..., Any], symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Give the forward rule, as for `jax.custom_jvp.defjvp`.

        **Arguments:**

        - `jvp`: called as `jvp(*nondiff, primals, tangents)`; returns `out, t_out`. The
            tangent of an integer is of the dtype `jax.dtypes.float0`. Any part of `t_out` may
            be `None`, which means zero.
        - `symbolic_zeros`: whether the tangents of arguments that are not being
            differentiated are `jax.custom_derivatives.SymbolicZero`s.

        **Returns:**

        `jvp`.
        """
        check_function(jvp, "jvp", "defjvp")
        rule = ft.partial(_forward_rule, jvp, symbolic_zeros)
        forward = Rule(rule, symbolic_zeros, surely_linear=True, name=name_of(jvp), source=jvp)
        self._rules.set_jvp(forward)
        self.jvp, self.symbolic_zeros, self._has_rules = jvp, symbolic_zeros, True
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Give one function for each argument, as for `jax.custom_jvp.defjvps`.

        **Arguments:**

        - `*jvps`: called as `jvp(t, out, *primals)`, where `t` is the tangent of one
            argument; each returns a term of the tangent of the output. `None` is zero.
        """
        fn: Any = self

        def sum_of_terms(primals, ts):
            out = fn(*primals)
            pairs = zip(jvps, ts, strict=True)
            terms = [term(t, out, *primals) for term, t in pairs if term is not None]
            return out, tangents.add(*terms) if terms else None

        sum_of_terms.__qualname__ = f"{name_of(self)}.defjvps"
        self.defjvp(sum_of_terms)


def _forward_rule(jvp, symbolic_zeros, primals, tangents, *, nondiff=None):
    """A rule of JAX's form as one of this library's."""
    values = () if nondiff is None else nondiff.values()
    leaves, treedef = jax.tree.flatten(primals, is_leaf=is_none)
    ts = [
        zero_from_primal(x, symbolic_zeros) if t is None and is_arraylike(x) else t
        for x, t in zip(leaves, jax.tree.leaves(tangents, is_leaf=is_none), strict=True)
    ]
    return jvp(*values, primals, jax.tree.unflatten(treedef, ts))
