r"""Arithmetic on tangents in which `None` is zero.

A tangent (or a cotangent: the same functions serve both) has the structure of its primal,
with `None` where it is zero: instead of the whole tree, a branch, or a leaf. A leaf
that can't be perturbed (an integer, a boolean, a PRNG key, a function, a string) has the
tangent `None` as well. No function makes arrays of zeros, except
[`eqx_grads.tangents.materialize`][].

!!! example

    ```python
    import equinox as eqx
    import eqx_grads.tangents as tangents
    import jax
    import jax.numpy as jnp

    @eqx.filter_custom_jvp
    def multiply(x, y):
        return x * y

    @multiply.def_jvp
    def multiply_jvp(primals, tans):
        x, y = primals
        t_x, t_y = tans  # either may be `None`
        return x * y, tangents.add(tangents.scale(t_x, y), tangents.scale(t_y, x))

    print(jax.grad(multiply)(jnp.array(2.0), jnp.array(3.0)))
    ```

    ```text
    3.0
    ```
"""

import functools as ft
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, PyTree

from ._errors import check_function, rule_error, type_of
from ._jaxprs.operands import flagged, restricted
from ._tangent_spaces import (
    as_numbers,
    as_tangent,
    broadcasts_to,
    check_field_names,
    check_shapes,
    dtype_of_array,
    is_arraylike,
    is_none,
    is_zero_leaf,
    materialize_leaves,
    project_leaves,
    promote,
    zip_trees,
)
from ._trees import is_leaf_structure, one_level


def is_zero(t: PyTree) -> bool:
    """Return whether a tangent is symbolically zero: `None`, or a tree in which all leaves are.

    JAX's symbolic zeros and arrays of dtype `float0` count as zero too. An array of zeros
    does not: its values are not inspected, so the answer is a Python `bool` even for traced
    tangents.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        print(tangents.is_zero({"weight": None, "bias": None}))
        print(tangents.is_zero({"weight": None, "bias": jnp.zeros(2)}))
        ```

        ```text
        True
        False
        ```

    **Arguments:**

    - `t`: a tangent of anything.

    **Returns:**

    A Python `bool`.
    """
    leaves = jax.tree.leaves(t, is_leaf=lambda x: isinstance(x, SymbolicZero))
    return all(map(is_zero_leaf, leaves))


def add(*ts: PyTree) -> PyTree:
    """Return the sum of tangents.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        t = {"weight": jnp.array(1.0), "bias": None}
        total = tangents.add(t, None, {"weight": jnp.array(2.0), "bias": jnp.array(3.0)})
        print(total["weight"], total["bias"])
        ```

        ```text
        3.0 3.0
        ```

    **Arguments:**

    - `*ts`: tangents of one value.

    **Returns:**

    Their sum; `None` wherever all of them are zero. The sum of no tangents is `None`.
    Leaves of different dtypes are promoted as in `jnp.promote_types`.

    **Raises:**

    [`eqx_grads.RuleError`][] if the structures or shapes differ: tangents of one value never
    broadcast.
    """
    return zip_trees(_add_leaves, ts)


def _add_leaves(*ts):
    ts = [as_tangent(t) for t in ts if not is_zero_leaf(t)]
    if not ts:
        return None
    return ft.reduce(operator.add, _alike(*ts))


def _alike(*ts: Array) -> list[Array]:
    """Tangents of one shape, in their common dtype."""
    check_shapes(ts)
    dtype = promote(ts)
    return [t.astype(dtype) for t in ts]


def neg(t: PyTree) -> PyTree:
    """Return the negative of a tangent.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        print(*tangents.neg((jnp.array(1.0), None)))
        ```

        ```text
        -1.0 None
        ```

    **Arguments:**

    - `t`: a tangent of anything.

    **Returns:**

    `-t`; `None` where it is zero.
    """
    return jax.tree.map(lambda x: None if is_zero_leaf(x) else -as_tangent(x), t)


def scale(t: PyTree, s: ArrayLike) -> PyTree:
    """Multiply a tangent by a number or an array.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        print(*tangents.scale((jnp.array(1.0), None), 3.0))
        ```

        ```text
        3.0 None
        ```

    **Arguments:**

    - `t`: a tangent of anything.
    - `s`: a number or an array that broadcasts to each leaf of `t`. It may be traced. It
        is cast to the dtype of the leaf, so the result is a tangent of the same value.

    **Returns:**

    `s * t`; `None` where `t` is zero, even if `s` is infinite there.

    **Raises:**

    [`eqx_grads.RuleError`][] if `s` is complex and a leaf is real, or if `s` would
    broadcast the leaf to another shape.
    """

    def scale_leaf(x):
        if is_zero_leaf(x):
            return None
        x, s_ = as_tangent(x), as_numbers(s, "The factor `s` of a tangent")
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            do = "Give an array of floats. The order of the arguments is `scale(t, s)`."
            raise rule_error("A tangent was an integer.", f"it is {type_of(x)}", do=do)
        if jnp.iscomplexobj(s_) and not jnp.iscomplexobj(x):
            raise rule_error(
                "A real tangent was scaled by a complex number.",
                f"the tangent is {type_of(x)}, the number {type_of(s_)}",
                do="The result would not be a tangent of a real value. "
                "Take the real part of the number, or of the product.",
            )
        if not broadcasts_to(s_.shape, x.shape):
            raise rule_error(
                "Scaling a tangent would change its shape.",
                f"the tangent is {type_of(x)}, the factor {type_of(s_)}",
                do="A tangent has the shape of its primal. Use `tangents.linear` for a "
                "linear map to another shape.",
            )
        return x * jnp.broadcast_to(s_.astype(x.dtype), x.shape)

    return jax.tree.map(scale_leaf, t)


def linear(fn: Callable[..., Array], *ts: PyTree) -> PyTree:
    """Apply a linear map to tangents, leaf by leaf, and skip the zeros.

    `fn` is not called where all of its arguments are zero. Where only some are, they enter
    as the number `0.0`, and `fn` is differentiated with respect to the others. So the terms of
    the zeros are not part of the result, and `0 * inf` does not arise.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        t_x, t_y = jnp.array([1.0, 2.0]), None
        print(tangents.linear(jnp.sum, t_x))
        print(tangents.linear(jnp.sum, t_y))
        print(tangents.linear(lambda a, b: jnp.sum(a) + jnp.inf * b, t_x, t_y))
        ```

        ```text
        3.0
        None
        3.0
        ```

    **Arguments:**

    - `fn`: a function of as many arrays as there are `ts`, linear in all of them together.
    - `*ts`: tangents, of the same structure.

    **Returns:**

    The tree of the `fn(leaf, ...)`; `None` where all leaves are zero.
    """

    check_function(fn, "fn", "tangents.linear")

    def linear_leaf(*xs):
        indices = flagged(not is_zero_leaf(x) for x in xs)
        if not indices:
            return None
        nonzero = [as_tangent(xs[i]) for i in indices]
        if len(nonzero) == len(xs):
            return fn(*nonzero)
        of_nonzero = restricted(fn, [0.0] * len(xs), indices)
        return jax.jvp(of_nonzero, list(map(jnp.zeros_like, nonzero)), nonzero)[1]

    return zip_trees(linear_leaf, ts)


def dot(a: PyTree, b: PyTree) -> Array | None:
    """Return the inner product of two tangents: the sum over leaves of the real part of
    `conj(a) b`.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        a = {"weight": jnp.array([1.0, 2.0]), "bias": None}
        b = {"weight": jnp.array([3.0, 4.0]), "bias": jnp.array(5.0)}
        print(tangents.dot(a, b))
        ```

        ```text
        11.0
        ```

    **Arguments:**

    - `a`, `b`: tangents of one value.

    **Returns:**

    A real scalar, or `None` if no leaf is non-zero in both.
    """

    def dot_leaf(x, y):
        if is_zero_leaf(x) or is_zero_leaf(y):
            return None
        return jnp.real(jnp.vdot(*_alike(as_tangent(x), as_tangent(y))))

    return _add_leaves(*jax.tree.leaves(zip_trees(dot_leaf, (a, b))))


def where(condition: ArrayLike, a: PyTree, b: PyTree) -> PyTree:
    """Select, leaf by leaf, `a` where the condition holds and `b` elsewhere.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        t = tangents.where(jnp.array([True, False]), jnp.array([1.0, jnp.nan]), None)
        print(t)
        ```

        ```text
        [1. 0.]
        ```

    **Arguments:**

    - `condition`: a boolean or an array of them that broadcasts to every leaf.
    - `a`, `b`: tangents of one value.

    **Returns:**

    A tangent; `None` where both are zero.
    """

    def where_leaf(x, y):
        if is_zero_leaf(x) and is_zero_leaf(y):
            return None
        x = jnp.zeros_like(y) if is_zero_leaf(x) else as_tangent(x)
        y = jnp.zeros_like(x) if is_zero_leaf(y) else as_tangent(y)
        x, y = _alike(x, y)
        is_bool = dtype_of_array(condition) == jnp.bool_
        if not is_bool or not broadcasts_to(jnp.shape(condition), x.shape):
            raise rule_error(
                "The `condition` of `tangents.where` is not booleans that broadcast to it.",
                f"`condition` is {type_of(condition)}, the tangent {type_of(x)}",
                do="Give it a comparison, such as `x > 0`.",
            )
        mask = jnp.broadcast_to(jnp.asarray(condition), x.shape)
        return jnp.where(mask, x, y)

    return zip_trees(where_leaf, (a, b))


def materialize(primal: PyTree, t: PyTree) -> PyTree:
    """Return a tangent with arrays instead of `None`, as raw `jax.jvp` wants it.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax
        import jax.numpy as jnp

        primal = {"weight": jnp.ones(2), "step": jnp.array(0)}
        t = tangents.materialize(primal, None)
        print(t["weight"])
        print(t["step"].dtype == jax.dtypes.float0)
        ```

        ```text
        [0. 0.]
        True
        ```

    **Arguments:**

    - `primal`: the value whose tangent `t` is.
    - `t`: its tangent.

    **Returns:**

    A tree like `primal`. Floating and complex leaves (including Python and NumPy numbers)
    have an array of their shape and dtype. Integers, booleans and PRNG keys have an array of
    dtype `float0`. Leaves that are not arrays have `None`.

    **Raises:**

    [`eqx_grads.RuleError`][] if `t` is not a tangent of `primal`, for example if you swapped
    the two.
    """
    leaves, treedef = jax.tree.flatten(primal, is_leaf=is_none)
    return jax.tree.unflatten(treedef, materialize_leaves(t, primal, leaves))


def zeros_like(primal: PyTree) -> PyTree:
    """Return the zero tangent with the structure of `primal`: every leaf is `None`.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        print(tangents.zeros_like((jnp.ones(2), "name")))
        ```

        ```text
        (None, None)
        ```

    **Arguments:**

    - `primal`: anything.

    **Returns:**

    The same tree of `None`.
    """
    return jax.tree.map(lambda _: None, primal)


def of(module: Any, **fields: PyTree) -> Any:
    """Return the (co)tangent of a Module with the given fields; all other fields are zero.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads.tangents as tangents
        import jax
        import jax.numpy as jnp

        linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        ct = tangents.of(linear, bias=jnp.ones(3))
        print(ct.weight, ct.bias)
        ```

        ```text
        None [1. 1. 1.]
        ```

    **Arguments:**

    - `module`: an `eqx.Module`, an `nnx.Module`, or an object of another class that is
        registered as a PyTree with the names of its fields: a dataclass or a named tuple, say.
    - `**fields`: tangents of the named fields. For a field with a single array in it, such as
        an `nnx.Param`, you may pass the tangent of the array. For a field that has fields, you
        may pass a mapping, such as an `nnx.State`: `tangents.of(module, **state)`.

    **Returns:**

    An object of the same class.

    **Raises:**

    [`eqx_grads.RuleError`][] for a name that is not a field, or is a static one.
    """
    keys, children, treedef = one_level(module)
    names = [getattr(key, "name", None) for key in keys]
    check_field_names(module, names, fields)
    ts = [
        _tangent_of_field(fields[name], child) if name in fields else zeros_like(child)
        for name, child in zip(names, children, strict=True)
    ]
    return jax.tree.unflatten(treedef, ts)


def _tangent_of_field(t, field):
    if isinstance(t, Mapping) and not isinstance(field, Mapping):
        return of(field, **t)
    as_leaf = lambda x: jnp.asarray(x) if is_arraylike(x) else x
    t = jax.tree.map(lambda x: None if is_zero_leaf(x) else as_leaf(x), t)
    structure = jax.tree.structure(field)
    is_boxed = structure.num_leaves == 1 and not is_leaf_structure(structure)
    if is_boxed and t is not None and is_leaf_structure(jax.tree.structure(t)):
        return jax.tree.unflatten(structure, [t])
    return t


def project(ct: PyTree, primal: PyTree) -> PyTree:
    """Project a cotangent onto the space of its primal: its shapes and dtypes.

    Every cotangent that a backward rule returns is projected. Autodiff does the same. The
    transpose of a broadcast is a sum, and the transpose of a cast is a cast. The transpose of
    a cast from real to complex numbers takes the real part.

    !!! example

        ```python
        import eqx_grads.tangents as tangents
        import jax.numpy as jnp

        bias = jnp.zeros(3, jnp.bfloat16)
        ct = tangents.project(jnp.ones((5, 3)), bias)
        print(ct, ct.dtype)
        ```

        ```text
        [5 5 5] bfloat16
        ```

    **Arguments:**

    - `ct`: the cotangent: a tree like `primal`, with `None` for any part that is zero.
    - `primal`: the value whose cotangent it is. Only the shapes and dtypes of its leaves are
        used.

    **Returns:**

    A tree with exactly the structure of `primal`. A leaf is summed over the axes along which
    the primal would have been broadcast. It is cast to the primal's dtype, within the floating
    and complex dtypes, with the real part for a real primal. Integers, booleans, keys and
    leaves that are not arrays have `None`.

    **Raises:**

    [`eqx_grads.RuleError`][] for any other cotangent, with the path of the leaf.
    """
    leaves, treedef = jax.tree.flatten(primal, is_leaf=is_none)
    return jax.tree.unflatten(treedef, project_leaves(ct, primal, leaves))
