"""`filter_map`: `jax.vmap` in chunks. The backward pass recomputes one chunk at a time."""

import math
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from .._errors import check_flags, check_function, name_of, rule_error
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic
from .._rules.float_args import as_count
from .._rules.tree_split import call_on_arrays
from .._tangent_spaces import is_numeric_array
from .carry import common_length
from .chunked_scan import near_divisor, scan_in_chunks


def filter_map(
    f: Callable[..., PyTree], *xs: PyTree, chunk: int | None = None, checkpoint: bool = True
) -> PyTree:
    r"""Apply a function to each slice of its arguments, with the memory of one chunk.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(3, "scalar", 256, 2, key=jax.random.key(0))
        xs = jax.random.normal(jax.random.key(1), (1000, 3))

        @eqx.filter_grad
        def gradient(mlp):
            # The activations of 50 examples are in memory, not of 1000.
            return jnp.mean(eqg.filter_map(mlp, xs, chunk=50))

        print(gradient(mlp).layers[0].weight.shape)
        ```

        ```text
        (256, 3)
        ```

    **Arguments:**

    - `f`: called with one slice of each of `xs`. A function, a bound method or a Module. The
        values that it closes over, or has as leaves, are the same for all slices, and are
        differentiated as anywhere else.
    - `xs`: any PyTrees. Arrays, random keys included, have the same length along their first
        axis. All other leaves are passed unchanged.
    - `chunk`: how many slices are computed at once, by `jax.vmap`. About the square root of the
        length by default. The last chunk may be shorter.
    - `checkpoint`: whether the backward pass recomputes each chunk. If not, the residuals of
        all chunks are saved, as `jax.lax.map(..., batch_size=chunk)` does.

    **Returns:**

    The outputs of `f`, stacked along a new first axis. Leaves that are not arrays come back
    unchanged, and are not stacked.

    **Derivative:**

    The derivative of `jax.vmap(f)(*xs)`, in both modes, to all orders. The backward pass calls
    `f` once more for each chunk, and adds up the gradients of values that all slices share.

    **Raises:**

    [`eqx_grads.RuleError`][] if `xs` has no array, if the arrays do not have one length along
    their first axis, or if `chunk` is not a positive integer.
    """
    check_function(f, "f", "filter_map")
    check_flags("filter_map", checkpoint=checkpoint)
    n = common_length(f"`filter_map` of `{name_of(f)}`", xs, is_numeric_array)
    if chunk is None:
        # A number of slices that is symbolic can't be divided: they are one chunk.
        chunk = near_divisor(n, math.sqrt(n)) if not is_symbolic(n) and n > 3 else 3
    elif is_symbolic(n):
        raise rule_error(
            f"`filter_map` of `{name_of(f)}` can't divide a symbolic number of slices.",
            f"there are {n}, and `chunk` is {chunk!r:.60}",
            do="Leave out `chunk`, or export the function for a fixed number.",
        )
    else:
        do = "Give a positive integer, or `None` for about the square root of the length."
        chunk = as_count("filter_map", "chunk", chunk, do=do)
    return _run(f, xs, n, chunk, checkpoint)


@compile_eager_calls
def _run(f, xs, n, chunk, checkpoint):
    def in_chunks(of_slice, arrays):
        of_chunk = jax.vmap(of_slice)
        if checkpoint:
            # In a scan, the compiler can't merge the two evaluations of a chunk.
            in_scan = not is_symbolic(n) and n >= 2 * chunk
            of_chunk = jax.checkpoint(of_chunk, prevent_cse=not in_scan)
        step = lambda _, xs, init: (None, of_chunk(xs))
        return scan_in_chunks(step, None, arrays, chunk=chunk, reverse=False)[1]

    # The arrays of `f` itself have no slices.
    return call_on_arrays(in_chunks, lambda *xs: f(*xs), xs, {}, is_numeric_array)
