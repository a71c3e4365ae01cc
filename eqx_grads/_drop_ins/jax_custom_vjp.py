"""`jax_custom_vjp`: called as `jax.custom_vjp` is, on the rules of this library."""

import functools as ft
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.interpreters import ad

from .._errors import check_flags, check_function, is_pair, name_of
from .._rules.closure_convert import Opaque
from .._rules.custom_vjp import ReverseRules
from .._rules.rule import Rule
from .._rules.wrapper import P, T
from .._tangent_spaces import is_arraylike, is_differentiable, is_none
from .._trees import mirror, prefix_leaves
from .jax_decorated import AbstractJaxDecorated, merge


class jax_custom_vjp(AbstractJaxDecorated[P, T]):
    """Replace `jax.custom_vjp`, with the rules of this library: change `jax.custom_vjp` to
    `eqg.jax_custom_vjp`, and leave the rest unchanged.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.jax_custom_vjp
        def f(x, y):
            return jnp.sin(x) * y

        def f_fwd(x, y):
            return f(x, y), (jnp.cos(x), jnp.sin(x), y)

        def f_bwd(residuals, ct):
            cos_x, sin_x, y = residuals
            return cos_x * ct * y, sin_x * ct

        f.defvjp(f_fwd, f_bwd)

        print(jax.grad(f)(0.0, 3.0))
        print(jax.jvp(f, (0.0, 3.0), (1.0, 0.0))[1])  # an error with `jax.custom_vjp`
        ```

        ```text
        3.0
        3.0
        ```

    Code for `jax.custom_vjp` works in the same way, with these exceptions:

    - The library does not compute the terms of outputs that are not used. JAX multiplies
        these terms by zeros, and the product is NaN where the factor is NaN.
    - Python and NumPy integers stay what they are; in JAX they are arrays under `jit`.
    - A cotangent is summed over the axes along which its argument would have broadcast. In
        JAX its shape is an error.

    These work too: forward mode, and traced values that the function, its rules or the
    arguments of `nondiff_argnums` close over. Arguments of `nondiff_argnums` may be traced.
    Arguments may have leaves that are not arrays, such as an `eqx.Module`. The flag
    `jax_custom_vjp3` is accepted.

    **Arguments:**

    - `fun`: a function. As in JAX, it does not bind as a method.
    - `nondiff_argnums`, `nondiff_argnames`: the positions, or the names, of arguments that
        are not differentiated. The backward rule gets them first. Differentiating one is
        an error.

    **Derivative:**

    The reverse rule is yours (see `defvjp`). It need not be linear. Forward mode is the
    derivative of `fun` itself. Higher orders differentiate your rules.
    """

    mode, how, stops = "VJP", "{}.defvjp(fwd, bwd)", False
    new_rules, unset = ReverseRules, {"fwd": None, "bwd": None, "optimize_remat": False}

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
        generic_batching: bool = False,
    ) -> None:
        """Give the reverse rule, as for `jax.custom_vjp.defvjp`.

        **Arguments:**

        - `fwd`: called as `fwd(*args)`, like the function; returns `out, residuals`, where
            `residuals` is any PyTree.
        - `bwd`: called as `bwd(*nondiff, residuals, ct)`; returns one cotangent for each of
            the other arguments, with `None` for any part that is zero.
        - `symbolic_zeros`: whether each leaf of the arguments of `fwd` is a
            `jax.custom_derivatives.CustomVJPPrimal`, and the cotangents of outputs that are
            not used are `jax.custom_derivatives.SymbolicZero`s.
        - `optimize_remat`: accepted, but has no effect: under `jax.checkpoint`, `fwd` is
            called in both passes, as in JAX without the option.
        - `generic_batching`: accepted, but has no effect: an output that a batch shares always
            has the right gradient.
        """
        check_function(fwd, "fwd", "defvjp")
        check_function(bwd, "bwd", "defvjp")
        flags = {"optimize_remat": optimize_remat, "generic_batching": generic_batching}
        check_flags("defvjp", symbolic_zeros=symbolic_zeros, **flags)
        fwd_rule = ft.partial(_fwd_rule, fwd, self.nondiff_argnums, symbolic_zeros)
        zero = SymbolicZero if symbolic_zeros else ad.zeros_like_aval
        bwd_rule = ft.partial(_bwd_rule, bwd, zero)
        self._rules.fwd_rule = Rule(fwd_rule, name=name_of(fwd), source=fwd)
        self._rules.bwd_rule = Rule(bwd_rule, symbolic_zeros, name=name_of(bwd), source=bwd)
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros
        self.optimize_remat, self._has_rules = optimize_remat, True


class _Types(Opaque):
    """The types of the cotangents of a call: of each argument a mirror, with `False` for a leaf
    that can't have one, and of each leaf of the output, with `None`. And the structures."""

    def __init__(self, args: tuple[Any, ...]):
        # A reference has the dtype of an array, and no cotangent.
        of_arg = lambda x: is_arraylike(x) and is_differentiable(x) and _ct_type(x)
        self.ct_args = [(mirror(of_arg, arg), jax.tree.structure(arg)) for arg in args]

    def of(self, out: Any) -> Self:
        leaves, self.treedef = jax.tree.flatten(out, is_leaf=is_none)
        self.ct_out = list(map(_ct_type, leaves))
        return self


def _fwd_rule(fwd, argnums, symbolic_zeros, /, *args, perturbed, nondiff=None):
    """A forward pass of JAX's form as one of this library's."""
    values, types = args, _Types(args)  # which `fwd` may change
    if symbolic_zeros:
        leaves, treedef = jax.tree.flatten(args)
        leaves = map(CustomVJPPrimal, leaves, jax.tree.leaves(perturbed))
        values = jax.tree.unflatten(treedef, leaves)  # as JAX does, whatever the class
    if nondiff is not None:
        values = merge(values, argnums, nondiff)
    result = fwd(*values)
    if not is_pair(result):
        return result  # an error
    out, residuals = result
    return out, (residuals, types.of(out))


def _ct_type(x):
    return jax.typeof(x).to_tangent_aval() if is_arraylike(x) else None


def _bwd_rule(bwd, zero, kept, ct, *, nondiff=None):
    """A backward rule of JAX's form as one of this library's."""
    residuals, types = kept
    values = () if nondiff is None else nondiff.values()
    pairs = zip(types.ct_out, jax.tree.leaves(ct, is_leaf=is_none), strict=True)
    cts = [zero(t) if ct is None and t is not None else ct for t, ct in pairs]
    result = bwd(*values, residuals, jax.tree.unflatten(types.treedef, cts))
    if not isinstance(result, tuple | list) or len(result) != len(types.ct_args):
        return result  # an error
    return tuple(_expand(ct, *arg) for ct, arg in zip(result, types.ct_args, strict=True))


def _expand(ct, types, treedef):
    """The cotangent of an argument. As in JAX, one leaf may be the cotangent of all leaves of a
    part of the argument, and the cotangent of an integer is dropped."""
    try:
        cts = prefix_leaves(ct, types, is_leaf=is_none)
    except ValueError:  # another structure, which is an error
        return ct
    pairs = zip(cts, jax.tree.leaves(types), strict=True)
    return jax.tree.unflatten(treedef, [None if t is False else ct for ct, t in pairs])
