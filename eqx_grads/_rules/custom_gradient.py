"""`custom_gradient`: a function that returns its value and its backward rule, a closure."""

import functools as ft
from collections.abc import Callable
from typing import Any

from .._errors import check_function, is_pair, name_of, place_of, rule_error, show_tree
from .custom_vjp import custom_vjp
from .rule import Rule


def custom_gradient(fn: Callable[..., Any]) -> Any:
    """Decorate a function that returns its value and its own backward rule, a closure.

    The form of `jax.custom_gradient` and TensorFlow's `tf.custom_gradient`. All functions
    may close over traced values, and arguments may be any PyTrees.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.custom_gradient
        def log1pexp(x):
            e = jnp.exp(x)

            def gradient(ct):
                return ct * (1 - 1 / (1 + e))

            return jnp.log(1 + e), gradient

        print(jax.grad(log1pexp)(100.0))
        ```

        ```text
        1.0
        ```

    **Arguments:**

    - `fn`: returns `out, gradient`, where `gradient(ct)` returns one cotangent for each
        positional argument: a tuple, or the cotangent itself, if there is one argument.

    **Returns:**

    An [`eqx_grads.custom_vjp`][], which returns `out`.

    **Derivative:**

    Reverse mode calls `gradient`. Forward mode differentiates `out` as it is computed.
    """

    check_function(fn, "fn", "custom_gradient")

    name, place = name_of(fn), place_of(fn)
    do = "Return `out, gradient`, where `gradient(ct)` returns the cotangents of the arguments."

    def fwd(*args, **kwargs):
        result = fn(*args, **kwargs)
        if not is_pair(result) or not callable(result[1]):
            what, returned = "return a value and a function", f"it returned {show_tree(result)}"
            raise rule_error(f"`{name}` did not {what}.", returned, place, do=do)
        return result

    @ft.wraps(fn)
    def value(*args, **kwargs):
        return fwd(*args, **kwargs)[0]

    decorated = custom_vjp(value)
    decorated._rules.fwd_rule = Rule(fwd, name=name, source=fn)
    bwd_name = f"gradient, returned by {name}"
    decorated._rules.bwd_rule = Rule(_custom_gradient_bwd, name=bwd_name, source=fn)
    return decorated


_CONVENTIONS = "It is called as `gradient(ct)`, and returns the cotangents of the arguments."


def _custom_gradient_bwd(gradient, ct, *, perturbed):
    cts = Rule(gradient, conventions=_CONVENTIONS)(ct)
    if isinstance(cts, tuple | list) and len(cts) == len(perturbed):
        return tuple(cts)
    return (cts,) if len(perturbed) == 1 else cts
