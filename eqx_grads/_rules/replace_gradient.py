"""`replace_gradient`, `with_gradient_of`: one function's value, another's derivative."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import check_function, name_of, rule_error, show_path, show_tree, type_of
from .._tangent_spaces import tangents_match
from .._trees import on_leaves
from .custom_jvp import custom_jvp
from .tree_split import AbstractTransformed
from .wrapper import set_metadata


def replace_gradient(value: PyTree, surrogate: PyTree) -> PyTree:
    r"""Return one value with the derivative of another.

    The usual spelling `surrogate + stop_gradient(value - surrogate)` rounds, and is NaN
    where `value` and `surrogate` are infinite. `replace_gradient` returns `value`
    itself, bit by bit.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        straight_through_round = lambda x: eqg.replace_gradient(jnp.round(x), x)
        print(straight_through_round(jnp.array(0.7)))
        print(jax.grad(straight_through_round)(0.7))
        ```

        ```text
        1.0
        1.0
        ```

    **Arguments:**

    - `value`: any PyTree.
    - `surrogate`: a PyTree of the same structure and shapes.

    **Returns:**

    `value`, unchanged.

    **Derivative:**

    The derivative of `surrogate`: $\dot y = \dot s$ and $\bar s = \bar y$, cast to the dtype of
    each. The derivative with respect to `value` is zero. Linear, so both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if structures or shapes differ, or if a leaf of one can be
    differentiated and the same leaf of the other can't.
    """
    _check_alike("`replace_gradient` was given", ("value", "surrogate"), value, surrogate)
    return on_leaves(_replace_gradient, value, surrogate)


def _check_alike(caller, names, value, surrogate):
    """Raise unless a surrogate has tangents like the tangents of a value. `names` are the
    user's names of the two."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    surrogates, surrogate_def = jax.tree.flatten(surrogate)
    if treedef != surrogate_def:
        raise rule_error(
            f"{caller} a value and a surrogate of different structure.",
            f"the {names[0]} is {show_tree(value)}",
            f"the {names[1]} is {show_tree(surrogate)}",
            do="Both need the same structure.",
        )
    for (path, x), s in zip(leaves, surrogates, strict=True):
        is_type = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in (x, s)]
        if not tangents_match(x, s) or is_type[0] != is_type[1]:
            raise rule_error(
                f"{caller} a surrogate that can't replace the value.",
                f"at value{show_path(path)}: the {names[0]} is {type_of(x)}, "
                f"the {names[1]} {type_of(s)}",
                do="Both need the same shape and a floating or complex dtype.",
            )


@custom_jvp
def _replace_gradient(value, surrogate):
    del surrogate
    return value


@_replace_gradient.def_jvp(symbolic_zeros=True)
def _replace_gradient_jvp(primals, tangents):
    def cast(t, x):
        t = t if t is None or jnp.iscomplexobj(x) else jnp.real(t)
        return None if t is None else t.astype(x.dtype)

    return _replace_gradient(*primals), list(map(cast, tangents[1], primals[0]))


def with_gradient_of(
    fn: Callable[..., Any], surrogate_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function with the values of one function and the derivative of another.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        step = eqg.with_gradient_of(lambda x: jnp.heaviside(x, 0.0), jax.nn.sigmoid)
        print(step(jnp.array(2.0)))
        print(jax.grad(step)(0.0))
        ```

        ```text
        1.0
        0.25
        ```

    **Arguments:**

    - `fn`: gives the value. It is never differentiated, so it may be a host callback.
    - `surrogate_fn`: takes the same arguments and returns the same structure and shapes.

    Either may be a Module; the parameters of `surrogate_fn` are differentiated. In the body of
    a class, both may be methods.

    **Returns:**

    A function (a Module that holds both).

    **Derivative:**

    The derivative of `surrogate_fn`, with respect to its arguments and to whatever it closes
    over. Both modes and all orders.

    **Raises:**

    As [`eqx_grads.replace_gradient`][].
    """
    check_function(fn, "fn", "with_gradient_of")
    check_function(surrogate_fn, "surrogate_fn", "with_gradient_of")
    wrapped = _WithGradientOf(fn, surrogate_fn)
    set_metadata(wrapped, fn)
    return wrapped


class _WithGradientOf(AbstractTransformed):
    surrogate_fn: Callable[..., Any]

    def __call__(self, /, *args, **kwargs):
        # Not only saves work: what has no derivative at all (a host callback) would raise.
        fn, args_, kwargs_ = jax.tree.map(
            lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x,
            (self._eqg_fn, args, kwargs),
        )
        value, surrogate = fn(*args_, **kwargs_), self.surrogate_fn(*args, **kwargs)
        names = [f"value of `{name_of(f)}`" for f in (self._eqg_fn, self.surrogate_fn)]
        _check_alike("`with_gradient_of` was given", names, value, surrogate)
        return on_leaves(_replace_gradient, value, surrogate)
