"""Linear recurrences, whose backward pass is the same recurrence in the other direction."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._errors import check_flags, check_option, rule_error, type_of
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic
from .._rules.custom_vjp import custom_vjp
from .._rules.explicit_sharding import distribute_like, explicit_spec, is_explicit
from .._tangent_spaces import promote, sum_dtype
from .accelerators import on_cpu, recurrence_method, STEPS_UNROLLED
from .chunked_scan import near_divisor, shift_in
from .over_time import as_arrays


METHODS = ("auto", "scan", "associative")


def linear_recurrence(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    reverse: bool = False,
    method: str = "auto",
) -> Array:
    r"""Return the states of the recurrence $h_t = a_t\,h_{t-1} + b_t$, for every step $t$.

    The products are elementwise. This is the core of linear recurrent units, of S4D and S5,
    of minimal GRUs, and of exponential moving averages.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        b = jnp.array([1.0, 2.0, 3.0])
        print(eqg.linear_recurrence(0.5, b))
        last = lambda b: eqg.linear_recurrence(0.5, b)[-1]
        print(jax.grad(last)(b))
        ```

        ```text
        [1.   2.5  4.25]
        [0.25 0.5  1.  ]
        ```

    **Arguments:**

    - `a`: the factors, real or complex, of shape `(time, ...)`. Broadcasts against `b`: with
        shape `(1, width)`, `(width,)` or `()`, it is the same at all times and is stored once.
    - `b`: the terms, of shape `(time, ...)`.
    - `h0`: the state before the first step, of shape `(...)`. The default is zero.
    - `reverse`: run from the last step to the first, $h_t = a_t\,h_{t+1} + b_t$; then `h0` is
        the state after the last.
    - `method`: `"scan"` is one step after another. `"associative"` runs chunks of about 16
        unrolled steps in parallel, and then the states between the chunks in the same way. It
        takes $O(\log T)$ steps, and twice the work. The two agree up to rounding. `"auto"` is
        `"scan"` if JAX's default backend is a CPU, and `"associative"` otherwise. A symbolic
        number of steps (see `jax.export`) is always run by `"scan"`.

    **Returns:**

    The states without the initial one, `(time, ...)`, in the common dtype of the arguments.

    **Derivative:**

    With $\dot h_0$ given, $\dot h_t = a_t\,\dot h_{t-1} + (\dot a_t\,h_{t-1} + \dot b_t)$ going
    forward. In reverse $g_t = \bar h_t + a_{t+1}\,g_{t+1}$, and then $\bar b_t = g_t$,
    $\bar a_t = g_t\,h_{t-1}$ and $\bar h_0 = a_1\,g_1$. The residuals are `a` and the states.
    Each mode is a linear recurrence, run by the same `method`. Both modes, all orders. Where
    `a` is the same for many elements of `b`, or under `jax.vmap` for all examples, its gradient
    is summed while it is computed.

    **Raises:**

    [`eqx_grads.RuleError`][] if the shapes do not broadcast, the time axis is missing, or the
    method is unknown.
    """
    check_flags("linear_recurrence", reverse=reverse)
    check_option("linear_recurrence", "method", method, METHODS)
    if method == "auto":
        method = recurrence_method()
    a, b, h0 = _fit(a, b, h0)
    if b.shape[0] == 0:
        return b
    if b.shape[0] == 1:
        return a * h0[None] + b  # no loop, so that a step of a scan is seen to be elementwise
    in_chunks = method == "associative" and not is_symbolic(b.shape[0])
    return _recurrence(a, b, h0, reverse=bool(reverse), in_chunks=in_chunks)


def _fit(a, b, h0):
    """The arguments in one dtype. `a` has as many axes as `b`, of the same length or of one."""
    given = {"a": a, "b": b, "h0": 0 if h0 is None else h0}
    a, b, first = as_arrays("linear_recurrence", given, real=False).values()
    dtype = promote([a, b, first])
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = promote([dtype, jnp.float32])
    try:
        shape = jnp.broadcast_shapes(a.shape, b.shape)
        fits = shape and jnp.broadcast_shapes(first.shape, shape[1:]) == shape[1:]
    except ValueError:
        shape, fits = (), False
    if not fits:
        raise rule_error(
            "The arguments of `linear_recurrence` do not fit together.",
            f"`a` is {type_of(a)}, `b` is {type_of(b)}, `h0` is "
            + type_of(None if h0 is None else first),
            do="`a` and `b` broadcast together to the shape `(time, ...)`, and `h0` broadcasts "
            "to `(...)`.",
        )
    a = a.astype(dtype)
    a = a.reshape((1,) * (len(shape) - a.ndim) + a.shape)
    b = jnp.broadcast_to(b.astype(dtype), shape)
    return _sharded_alike(a, b, jnp.broadcast_to(first.astype(dtype), shape[1:]))


def _sharded_alike(a, b, h0):
    """Over explicit mesh axes: steps and state, sharded as the product of `a` and `b` is."""
    if not (is_explicit(a) or is_explicit(b)):
        return a, b, h0
    product = a[:1] * b[:1]
    of_step = explicit_spec(product)[1:]
    b = distribute_like(b, product, (*explicit_spec(b)[:1], *of_step))
    # An array that is the same along an axis of the mesh is on all devices of the axis.
    of_a = [axis if n > 1 else None for axis, n in zip(of_step, a.shape[1:], strict=True)]
    a = distribute_like(a, product, (*explicit_spec(a)[:1], *of_a))
    return a, b, distribute_like(h0, product, of_step)


@custom_vjp
def _recurrence(a, b, s, *, reverse, in_chunks):
    """All states after `s`. `a` broadcasts to `b`. If `s` is `None`, the first state is its
    term, and each other step has the factor of the step before."""
    return _run(a, b, s, reverse, in_chunks)


@compile_eager_calls
def _run(a, b, s, reverse, in_chunks):
    if in_chunks and s is None:
        s = jnp.zeros_like(b[0])
        a = a if a.shape[0] == 1 else shift_in(a, jnp.ones_like(a[0]), reverse=reverse)
    if in_chunks:
        return _in_chunks(a, b, s, reverse)
    steps, lag, dtype = b.shape[0], 0, b.dtype
    if dtype == jnp.bfloat16 and on_cpu():  # XLA would convert all states in each step
        a, b, s = jax.tree.map(lambda x: x.astype(jnp.float32), (a, b, s))
    if s is None:
        s, lag = b[-1 if reverse else 0], 1 if reverse else -1

    def step(i: Any, carry: Any) -> tuple[Any, Any]:
        # A state is written in the place of its term. XLA can do that without a copy of all
        # terms in each step only if the term is read for one purpose.
        s, states = carry
        t = steps - 1 - i if reverse else i
        s = (a[0] if a.shape[0] == 1 else _at_time(a, t + lag)) * s + _at_time(states, t)
        update = jax.lax.dynamic_update_index_in_dim
        return s, update(states, s, t, 0, allow_negative_indices=False)

    return jax.lax.fori_loop(abs(lag), steps, step, (s, b))[1].astype(dtype)


def _at_time(x, t):
    return jax.lax.dynamic_index_in_dim(x, t, keepdims=False, allow_negative_indices=False)


def _in_chunks(a, b, s, reverse):
    """All states, in parallel. The factor of each chunk, and its last state if the first is
    zero, are a recurrence of the states between the chunks. Then follow the others."""
    steps, chunk = b.shape[0], near_divisor(b.shape[0], STEPS_UNROLLED)
    if steps <= 1.5 * STEPS_UNROLLED:
        return _states(a[None], b[None], s[None], reverse)[0]
    n, rest = divmod(steps, chunk)
    if rest > 0:
        early, late = slice(0, n * chunk), slice(n * chunk, None)
        if reverse:
            early, late = slice(rest, None), slice(0, rest)
        part = lambda x, of: x if x.shape[0] == 1 else x[of]
        first = _in_chunks(part(a, early), b[early], s, reverse)
        last = first[0 if reverse else -1]
        second = _in_chunks(part(a, late), b[late], last, reverse)
        return jnp.concatenate([second, first] if reverse else [first, second])
    a = a[None] if a.shape[0] == 1 else a.reshape(n, chunk, *a.shape[1:])
    b = b.reshape(n, chunk, *b.shape[1:])

    def step(composed: Any, t: Any) -> tuple[Any, Any]:
        factor, end = composed
        return (_at(a, t) * factor, _at(a, t) * end + b[:, t]), None

    first, others = (chunk - 1, range(chunk - 1)) if reverse else (0, range(1, chunk))
    (factor, end), _ = _each_step(step, (_at(a, first), b[:, first]), others, reverse)
    between = _in_chunks(factor, end, s, reverse)
    states = _states(a, b, shift_in(between, s, reverse=reverse), reverse)
    return states.reshape(steps, *b.shape[2:])


def _states(a, b, h, reverse):
    """The states of each step, in all chunks: `a` and `b` are `(chunks, steps, ...)`."""
    step = lambda h, t: 2 * (_at(a, t) * h + b[:, t],)
    return _each_step(step, h, range(b.shape[1]), reverse)[1]


def _each_step(step, carry, steps, reverse):
    """`jax.lax.scan` over numbers of steps, for all chunks at once, with outputs along axis 1.

    It is unrolled, but not on a CPU: there XLA computes all earlier steps again for each step.
    """
    if on_cpu():
        carry, ys = jax.lax.scan(step, carry, jnp.array(steps), reverse=reverse)
        return carry, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), ys)
    ys = {}
    for t in reversed(steps) if reverse else steps:
        carry, ys[t] = step(carry, t)
    return carry, jax.tree.map(lambda *ys: jnp.stack(ys, 1), *(ys[t] for t in steps))


def _at(a, t):
    return a[:, t if a.shape[1] > 1 else 0]


@_recurrence.def_fwd
def _recurrence_fwd(a, b, s, *, reverse, in_chunks):
    out = _recurrence(a, b, s, reverse=reverse, in_chunks=in_chunks)
    return out, (a, s, out)


# In reverse:
#
#     g_t = ct_t + a_{t+1} g_{t+1}      ct_b_t = g_t      ct_a_t = g_t h_{t-1}
#
# There, each step has the factor of the step before. Each kind is the other's transpose.
@_recurrence.def_bwd
@compile_eager_calls
def _recurrence_bwd(residuals, ct, *, reverse, in_chunks):
    a, s, out = residuals
    options = {"reverse": not reverse, "in_chunks": in_chunks}
    if s is None:
        g = _recurrence(a, ct, jnp.zeros_like(out[0]), **options)
        later = shift_in(g, jnp.zeros_like(g[0]), reverse=not reverse)
        return _sum_to(later * out, a.shape), g, None
    g = _recurrence(a, ct, None, **options)
    if in_chunks or a.shape == out.shape:
        ct_a = _sum_to(g * shift_in(out, s, reverse=reverse), a.shape)
    else:
        ct_a = _sum_of_products(s, out, g, a.shape, reverse)
    first = -1 if reverse else 0
    return ct_a, g, a[first] * g[first]


def _sum_of_products(s, out, g, shape, reverse):
    """The sum of g_t h_{t-1} over the examples, or times, that share a factor. A loop keeps no
    product, and XLA on a CPU would keep all of them for a sum."""
    at_all_times = shape[0] == 1

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        before, total = carry
        h, g_t = x
        product = (before * g_t).astype(total.dtype)
        if at_all_times:
            return (h, total + product), None
        return (h, total), _sum_to(product, shape[1:])

    unroll = 1 if is_symbolic(out.shape[0]) else 4  # a step does little
    carry, xs = (s, jnp.zeros_like(s, sum_dtype(s.dtype))), (out, g)
    (_, total), ct_a = jax.lax.scan(step, carry, xs, reverse=reverse, unroll=unroll)
    return (_sum_to(total[None], shape) if at_all_times else ct_a).astype(s.dtype)


def _sum_to(ct, shape):
    """The sum over the axes along which an array of this shape was broadcast."""
    axes = [i for i, (n, m) in enumerate(zip(ct.shape, shape, strict=True)) if n != m]
    return jnp.sum(ct, axes, keepdims=True) if axes else ct


@_recurrence.def_jvp
def _recurrence_jvp(primals, tangents, *, reverse, in_chunks):
    a, b, s = primals
    t_a, t_b, t_s = tangents
    options = {"reverse": reverse, "in_chunks": in_chunks}
    out = _recurrence(a, b, s, **options)
    if s is None:
        t_from_a = shift_in(t_a * out, jnp.zeros_like(out[0]), reverse=reverse)
    else:
        t_from_a = t_a * shift_in(out, s, reverse=reverse)
    return out, _recurrence(a, t_from_a + t_b, t_s, **options)


@_recurrence.def_vmap
def _recurrence_vmap(size, batched, a, b, s, **options):
    """Examples become another axis, of length one in what they share."""
    batch = lambda x, is_batched, axis: (
        jnp.moveaxis(x, 0, axis) if is_batched else jnp.expand_dims(x, axis)
    )
    a, b = map(batch, (a, b), batched, (1, 1))
    b = jnp.broadcast_to(b, (b.shape[0], size, *b.shape[2:]))
    if s is not None:
        s = jnp.broadcast_to(batch(s, batched[2], 0), b.shape[1:])
    return jnp.moveaxis(_recurrence(a, b, s, **options), 1, 0), True
