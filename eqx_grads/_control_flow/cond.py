"""`filter_cond`: branches that take and return any PyTrees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, PyTree

from .._errors import check_function, name_of, place_of, rule_error, type_of
from .._jaxprs.current_trace import is_in_shard_map
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.operands import at
from .._jaxprs.varying import vary_alike
from .._rules.tree_split import is_equal, OutputSpec
from .._tangent_spaces import holds_numbers, shape_of
from .carry import is_number


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

    - `pred`: a scalar: a boolean or a number.
    - `true_fun`, `false_fun`: functions, bound methods or Modules. The values that they close
        over are differentiated as anywhere else.
    - `operands`: any PyTrees, the arguments of the branch. Leaves that are not arrays are
        passed unchanged.

    **Returns:**

    The output of the chosen branch. Arrays, floats and complex numbers may differ between the
    branches. Python integers and booleans may differ too, and then become arrays. All other
    leaves (activation functions, strings, ...) must be equal.

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
    branches: list[tuple[Any, OutputSpec, list[int | None]]] = []

    def branch(fn, like=()):
        def run():
            out = fn(*operands)
            spec, arrays = OutputSpec.of(out, is_number)
            leaves = at(jax.tree.leaves(out), spec.split.indices)
            numbers = [x if isinstance(x, bool | int) else None for x in leaves]
            branches.append((fn, spec, numbers))
            if len(branches) == 2:
                _check_alike(*branches)
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
    _, spec, numbers = branches[0]
    for i, number in enumerate(numbers):
        # A Python number that both branches return does not become an array.
        if number is not None and all(is_equal(number, b[2][i]) for b in branches):
            arrays[i] = number
    return spec.tree(arrays)


def _check_predicate(pred: Any) -> None:
    if not holds_numbers(pred) or shape_of(pred) != () or jnp.iscomplexobj(pred):
        raise rule_error(
            "The `pred` of `filter_cond` is not one boolean or real number.",
            f"it is {type_of(pred)}",
            do="Give it a comparison of two numbers: `loss < 1`. For one choice for each "
            "element, use `jax.vmap` or `jnp.where`.",
        )


def _check_alike(one, other) -> None:
    (f, out_f, _), (g, out_g, _) = one, other
    text = f"`{name_of(f)}` returns {{}}, and `{name_of(g)}` {{}}"
    where = out_f.unlike(out_g, text, is_equal)
    if where:
        raise rule_error(
            "The branches of `filter_cond` return different things.",
            *where,
            place_of(f),
            place_of(g),
            do="Return one structure, and arrays of one shape and one dtype. A leaf that is "
            "not an array is static, and the same in both. Store a value that varies as an "
            "array.",
        )
