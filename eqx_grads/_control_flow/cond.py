"""`filter_cond`: branches that take and return any PyTrees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, PyTree

from .._errors import check_function, name_of, place_of, rule_error, show_path, type_of
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.varying import is_in_shard_map, vary_alike
from .._rules.tree_split import TreeSplit
from .._tangent_spaces import holds_numbers, is_type, shape_of
from .carry import is_number, same_static, structure_difference


def filter_cond(
    pred: ArrayLike,
    true_fun: Callable[..., PyTree],
    false_fun: Callable[..., PyTree],
    *operands: PyTree,
) -> PyTree:
    """Return `true_fun(*operands)` if `pred` is true, else `false_fun(*operands)`:
    `jax.lax.cond` for any PyTrees.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
        reset = lambda mlp: jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, mlp)

        @eqx.filter_jit
        def maybe_reset(mlp, flag):
            # `jax.lax.cond` takes no `mlp`: its activation function is not an array.
            return eqg.filter_cond(flag, reset, lambda mlp: mlp, mlp)

        assert jnp.all(maybe_reset(mlp, jnp.array(True))(jnp.ones(2)) == 0)
        ```

    **Arguments:**

    - `pred`: a boolean or a number, of no dimensions.
    - `true_fun`, `false_fun`: functions, bound methods or Modules. The values that they close
        over are differentiated as anywhere else.
    - `operands`: any PyTrees, the arguments of the branch. Leaves that are not arrays are
        passed unchanged.

    **Returns:**

    The output of the chosen branch. Arrays, floats and complex numbers may differ between the
    branches. Python integers and booleans may differ too, and then become arrays. All other
    leaves (activation functions, strings, ...) must be the same. Two functions are the same if
    they were made by the same code and close over the same values.

    **Derivative:**

    The derivative of the chosen branch, in both modes and to all orders. Under `jax.vmap` of
    `pred`, JAX computes both branches. A value that is not finite in one of them may then make
    the gradient of the other NaN.

    **Raises:**

    [`eqx_grads.RuleError`][] if the branches return different structures, shapes, dtypes or
    static leaves.
    """
    check_function(true_fun, "true_fun", "filter_cond")
    check_function(false_fun, "false_fun", "filter_cond")
    _check_predicate(pred)
    return _run(true_fun, false_fun, jnp.asarray(pred), operands)


@compile_eager_calls
def _run(true_fun, false_fun, pred, operands):
    branches: list[_Branch] = []

    def branch(fn, like=()):
        def run():
            out = fn(*operands)
            split, arrays = TreeSplit.split(out, is_number)
            branches.append(_Branch(fn, out, split, arrays))
            if len(branches) == 2:
                _check_same_types(*branches)
            return [
                vary_alike([x], like_x)[0] for x, *like_x in zip(arrays, *like, strict=True)
            ]

        return run

    types = []
    if is_in_shard_map():
        # Inside `shard_map`, an output varies if the output of either branch does.
        types = [jax.make_jaxpr(branch(fn))().out_avals for fn in (true_fun, false_fun)]
        branches.clear()
    arrays = jax.lax.cond(pred, branch(true_fun, types), branch(false_fun, types))
    first = branches[0]
    for i, number in enumerate(first.python_numbers):
        # A Python number that both branches return does not become an array.
        if number is not None and all(
            same_static(number, b.python_numbers[i]) for b in branches
        ):
            arrays[i] = number
    return first.split.tree(arrays)


def _check_predicate(pred: Any) -> None:
    if not holds_numbers(pred) or shape_of(pred) != () or jnp.iscomplexobj(pred):
        raise rule_error(
            "The `pred` of `filter_cond` is not one boolean or real number.",
            f"it is {type_of(pred)}",
            do="Give it a comparison of two numbers: `loss < 1`. For one choice for each "
            "element, use `jax.vmap` or `jnp.where`.",
        )


class _Branch:
    """The output of a branch, without the arrays."""

    def __init__(
        self, fn: Callable[..., PyTree], out: PyTree, split: TreeSplit, arrays: list[Any]
    ):
        self.fn = fn
        self.split = split
        self.types = [jax.typeof(x) for x in arrays]
        self.leaves = split.leaves(self.types)
        leaves = jax.tree.leaves(out)
        numbers = [leaves[i] for i in split.indices]
        self.python_numbers = [x if isinstance(x, bool | int) else None for x in numbers]


def _check_same_types(one: _Branch, other: _Branch) -> None:
    names = f"`{name_of(one.fn)}`", f"`{name_of(other.fn)}`"

    def fail(where, this, that, do):
        path = show_path(one.split.path(where)) if isinstance(where, int) else where
        return rule_error(
            "The branches of `filter_cond` return different things.",
            f"at out{path}: {names[0]} returns {this}, and {names[1]} {that}",
            place_of(one.fn),
            place_of(other.fn),
            do=do,
        )

    if one.split.treedef != other.split.treedef:
        trees = one.split.mirror(one.types), other.split.mirror(other.types)
        raise fail(*structure_difference(*trees), do="Return the same structure from both.")
    shown = lambda z: type_of(z) if is_type(z) else f"{z!r:.60}"
    for i, (x, y) in enumerate(zip(one.leaves, other.leaves, strict=True)):
        is_array = is_type(x) and is_type(y)
        do = "Return one shape and one dtype." if is_array else _STATIC
        if not ((x.shape, x.dtype) == (y.shape, y.dtype) if is_array else same_static(x, y)):
            raise fail(i, shown(x), shown(y), do)


_STATIC = (
    "A leaf that is not an array is static, and the same in both. Store a value that varies as "
    "an array."
)
