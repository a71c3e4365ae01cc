"""`filter_while_loop`: a `while_loop` of any PyTree. With a bound, it has both modes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import ArrayLike, PyTree

from .._errors import check_function, name_of, place_of, rule_error, type_of
from .._jaxprs.current_trace import is_jit_disabled
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.varying import cast_carry, varying_axes
from .._rules.float_args import as_count
from .._rules.identity_op import backward_op
from .._tangent_spaces import dtype_of_array, shape_of
from .carry import as_array_if_varying, Carry


def filter_while_loop(
    cond_fun: Callable[[PyTree], ArrayLike],
    body_fun: Callable[[PyTree], PyTree],
    init: PyTree,
    *,
    max_steps: int | None = None,
    checkpoint: int | str | None = "sqrt",
) -> PyTree:
    r"""Repeat `carry = body_fun(carry)` while `cond_fun(carry)` is true: `jax.lax.while_loop`
    for any PyTrees. With `max_steps`, it also has a reverse mode.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def square_root(x):
            # The carry holds a function, which stays unchanged.
            step = lambda carry: (carry[0], 0.5 * (carry[1] + x / carry[1]))
            far = lambda carry: carry[0](carry[1] ** 2 - x) > 1e-5
            return eqg.filter_while_loop(far, step, (jnp.abs, x))[1]

        root, slope = jax.jvp(square_root, (2.0,), (1.0,))
        print(f"{root:.3f}, with the slope {slope:.3f}")
        ```

        ```text
        1.414, with the slope 0.354
        ```

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        def steps_to_ten(rate):
            # The number of steps depends on the rate, and is at most 1000.
            grow = lambda carry: carry * (1 + rate)
            small = lambda carry: carry < 10
            return eqg.filter_while_loop(small, grow, 1.0, max_steps=1000)

        value, slope = jax.value_and_grad(steps_to_ten)(0.5)
        print(f"{value:.2f}, with the slope {slope:.2f}")
        ```

        ```text
        11.39, with the slope 45.56
        ```

    **Arguments:**

    - `cond_fun`: whether to go on, a boolean scalar.
    - `body_fun`: takes and returns the carry.
    - `init`: the first carry, any PyTree. Its leaves vary or are static as in
        [`eqx_grads.filter_scan`][].
    - `max_steps`: the largest number of steps that the loop takes. If `cond_fun` is still true
        after them, the loop returns the last carry; call `cond_fun` on that carry to find out.
        Without `max_steps`, the loop has no bound and no reverse mode.
    - `checkpoint`: with `max_steps`, what the backward pass saves. `k` saves every `k`-th
        carry, and recomputes `k` steps at a time. `"sqrt"` is a `k` of about $\sqrt{T}$, with
        $T$ for `max_steps`. `None` saves the residuals of all steps, and takes the memory of
        `max_steps` steps.

    **Returns:**

    The last carry.

    **Cost:**

    With `max_steps`, the loop runs chunks of `k` steps (about $\sqrt{T}$ with `None`), and
    skips the chunks after its end. So it evaluates `body_fun` up to `k - 1` times too often,
    at `init`, and drops the results. It needs the memory of $T / k$ carries and of the
    residuals of $k$ steps. For each skipped chunk, the backward pass adds zeros to the
    gradient of what the body closes over. So do not make `max_steps` much larger than needed.

    Under `jax.vmap`, each example has its own number of steps, and the loop ends when the last
    example has finished. If an example takes no step, `body_fun` and its derivative should be
    finite at its `init`; otherwise use [`eqx_grads.zero_safe`][].

    **Derivative:**

    The derivative of the loop written out, with a constant number of steps: `cond_fun` has no
    derivative. With `max_steps`, both modes and all orders; without, forward mode only. For a
    root or a fixed point, decorate the function that runs the loop with
    [`eqx_grads.implicit`][], which needs no memory for the steps.

    **Raises:**

    [`eqx_grads.RuleError`][] if the carry that a step returns differs from the one it was
    given in structure, shapes, dtypes or static leaves.
    """
    check_function(cond_fun, "cond_fun", "filter_while_loop")
    check_function(body_fun, "body_fun", "filter_while_loop")
    # In an eager call, numbers that vary are operands, as arrays are.
    init = jax.tree.map(as_array_if_varying, init)
    chunk = None
    if max_steps is not None:
        do = "Give an integer from 0 to 2**31 - 1, or `None` for a loop without a bound."
        max_steps = as_count("filter_while_loop", "max_steps", max_steps, least=0, do=do)
        chunk = _steps_per_chunk(max_steps, checkpoint)
    # Without a checkpoint, the residuals of all chunks are saved.
    return _run(cond_fun, body_fun, init, max_steps, chunk, is_saved=checkpoint is None)


def _steps_per_chunk(max_steps: int, checkpoint: int | str | None) -> int:
    if checkpoint is None or (isinstance(checkpoint, str) and checkpoint == "sqrt"):
        return max(1, math.isqrt(max_steps))
    do = 'Give a positive integer, "sqrt" or `None`.'
    return as_count("filter_while_loop", "checkpoint", checkpoint, do=do)


@compile_eager_calls
def _run(cond_fun, body_fun, init, max_steps, chunk, is_saved):
    error = (
        f"`{name_of(body_fun)}`, the body of `filter_while_loop`, returned a different carry "
        "than it was given."
    )

    def step_of(carry, init):
        of_step = lambda xs: carry.arrays(body_fun(carry.tree(xs)), xs, body_fun, error)
        return of_step, carry.first(init)

    carry, init = Carry.settled(init, step_of)
    body, first = step_of(carry, init)
    cond = lambda arrays: _checked(cond_fun(carry.tree(arrays)), cond_fun)
    first = cast_carry(lambda arrays: jax.make_jaxpr(body)(arrays).out_avals, first)
    if max_steps is None:
        last = jax.lax.while_loop(cond, body, first)
        # Without `jit`, JAX runs the steps, and each has both modes.
        if not is_jit_disabled():
            place = place_of(body_fun)
            # One by one: an element that depends on no argument has a cotangent, and no error.
            # Nor has one that no step changes: JAX returns it as it was.
            pairs = zip(last, first, strict=True)
            last = [y if y is x else _unbounded_loop(y, place) for y, x in pairs]
        return carry.tree(last)
    return carry.tree(_bounded_loop(cond, body, first, max_steps, chunk, is_saved))


def _checked(more: Any, cond_fun: Callable[..., Any]) -> Any:
    if dtype_of_array(more) != np.bool_ or shape_of(more) != ():
        raise rule_error(
            f"`{name_of(cond_fun)}`, the `cond_fun` of `filter_while_loop`, did not return a "
            "boolean.",
            f"it returned {type_of(more)}",
            place_of(cond_fun),
            do="Return a comparison of two numbers, or `jnp.any` or `jnp.all` of an array.",
        )
    return more


@backward_op
def _unbounded_loop(ct, place):
    error = rule_error(
        "Reverse-mode differentiation does not work for `filter_while_loop` without a bound.",
        place,
        do="Pass `max_steps`, the largest number of steps. For a root or a fixed point, use "
        "`eqg.implicit`, which needs no bound.",
    )
    raise ValueError(str(error))  # as in JAX: there is a forward mode


def _bounded_loop(
    cond: Callable[[Sequence[jax.Array]], jax.Array],
    body: Callable[[Sequence[jax.Array]], list[jax.Array]],
    first: Sequence[jax.Array],
    max_steps: int,
    chunk: int,
    is_saved: bool,
) -> list[jax.Array]:
    """Two nested scans, which JAX differentiates.

    The outer scan skips the chunks after the end, by a `cond`. `jax.checkpoint` is around that
    `cond`: JAX does not see which residuals of a `cond` are the same in all steps, such as
    weights, and would save them once for each chunk.
    """
    # As `jax.lax.while_loop` does, the loop has the dtypes of the steps.
    program = jax.make_jaxpr(body)(first)
    types = program.out_avals
    # Where the body works across a named axis, it sees the carry of examples that have ended.
    is_across = any(hasattr(effect, "name") for effect in program.effects)
    first = [
        jax.lax.convert_element_type(x, t.dtype) for x, t in zip(first, types, strict=True)
    ]
    constant = [jax.lax.stop_gradient(x) for x in first]

    def goes_on(state):
        arrays, count = state
        # Not differentiated: `cond_fun` may call what has no derivative in JAX.
        program = jax.make_jaxpr(cond)(arrays)
        consts = list(map(jax.lax.stop_gradient, program.consts))
        run = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, consts))
        (more,) = run(*map(jax.lax.stop_gradient, arrays))
        return (count < max_steps) & jnp.asarray(more, bool)

    choose = lambda goes, xs, ys: [jnp.where(goes, *pair) for pair in zip(xs, ys, strict=True)]

    def step(state, _):
        # An example that has ended, in a batch or a chunk, may be where the body or its
        # derivative is not finite. So it is evaluated at the first carry instead.
        arrays, count = state
        goes = goes_on(state)
        new = body(arrays if is_across else choose(goes, arrays, constant))
        return (choose(goes, new, arrays), count + goes.astype(jnp.int32)), None

    def run_chunk(state, _):
        run = lambda state: jax.lax.scan(step, state, None, length=chunk)[0]
        some = _any_of_batch(goes_on(state))
        if axes := tuple(sorted(varying_axes(some))):
            # Inside `shard_map`, all devices run a chunk: there may be sums over them in it.
            some = jax.lax.psum(some.astype(jnp.int32), axes) > 0
        return jax.lax.cond(some, run, lambda state: state, state), None

    if not is_saved:
        run_chunk = jax.checkpoint(run_chunk, prevent_cse=False)
    *arrays, count = cast_carry(
        lambda xs: jax.make_jaxpr(lambda *xs: step((xs[:-1], xs[-1]), None))(*xs).out_avals,
        [*first, jnp.zeros((), jnp.int32)],
    )
    return jax.lax.scan(run_chunk, (arrays, count), None, length=-(-max_steps // chunk))[0][0]


@jax.custom_batching.custom_vmap
def _any_of_batch(x):
    """A boolean; under `jax.vmap`, whether it is true for any example, so that a `cond` stays
    one: with a batched predicate, JAX runs both branches."""
    return x


@_any_of_batch.def_vmap
def _(size, batched, x):
    return _any_of_batch(jnp.any(x, 0) if batched[0] else x), False
