"""The gated delta rule, in chunks of steps. Its backward pass keeps one state per chunk."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Integer

from .._errors import check_flags, rule_error, type_of
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic
from .._rules.custom_vjp import custom_vjp
from .._rules.float_args import as_count
from .._tangent_spaces import promote
from .accelerators import steps_of_delta_rule
from .over_time import as_arrays, zero_padding


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    decay: ArrayLike | None = None,
    *,
    state: ArrayLike | None = None,
    lengths: Integer[ArrayLike, "..."] | Sequence[int] | None = None,
    delta: bool = True,
    chunk: int | None = None,
    reverse: bool = False,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array]:
    r"""Write values to a matrix under keys, and read the matrix with queries, step by step.

    The state $S$ is a matrix for each head. A step scales the matrix, and replaces a part
    $\beta_t$ of what it holds under the key $k_t$ by the value $v_t$. Then it reads the matrix:

    $$S_t = e^{g_t} (I - \beta_t\,k_t k_t^\top)\,S_{t-1} + \beta_t\,k_t v_t^\top, \qquad
    o_t = S_t^\top q_t.$$

    This is Gated DeltaNet. Without a decay, it is DeltaNet. With `delta=False` it is gated
    linear attention, $S_t = e^{g_t} S_{t-1} + \beta_t\,k_t v_t^\top$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        k = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        v = jnp.array([[1.0], [2.0], [5.0]])
        out, state = eqg.gated_delta_rule(k, k, v, 1.0)
        print(state.ravel())  # the third step replaces what the first step wrote
        _, state = eqg.gated_delta_rule(k, k, v, 1.0, delta=False)
        print(state.ravel())

        last = lambda v: eqg.gated_delta_rule(k, k, v, 1.0)[0][-1, 0]
        print(jax.grad(last)(v).ravel())
        ```

        ```text
        [5. 2.]
        [6. 2.]
        [0. 0. 1.]
        ```

    **Arguments:**

    - `q`, `k`: the queries and keys, of shape `(time, ..., key)`. The axes between time and
        features are a batch and heads, or none. The delta rule needs keys of norm one: the
        state grows where $\beta_t |k_t|^2$ is more than two.
    - `v`: the values, of shape `(time, ..., value)`.
    - `beta`: how much of a value to write, of shape `(time, ...)`.
    - `decay`: $g_t$, the logarithm of the factor of the state, of shape `(time, ...)`. It is
        usually at most zero. $-\infty$ clears the state. The default is zero.
    - `state`: the state before the first step, of shape `(..., key, value)`. The default is
        zero.
    - `lengths`: the number of steps that count, of the shape of the first batch axes. After
        these steps outputs are zero, the state does not change, and no gradient passes.
    - `delta`: whether a step first removes what the matrix holds under the key.
    - `chunk`: the number of steps that run at once, as matrix products. The default is 32 on a
        CPU and 64 otherwise. It changes rounding only. A NaN or an infinity reaches all steps
        of its chunk, earlier ones too.
    - `reverse`: run from the last step to the first. Then `state` is the state after the last.
    - `scale`: a factor of the outputs. The default is one; `flash-linear-attention` has
        `key ** -0.5`.

    `q`, `k`, `v`, `beta` and `decay` broadcast over time, batch and heads: an axis
    along which all numbers are equal may have the length one. `beta` and `decay` may be one
    number.

    **Returns:**

    The outputs, `(time, ..., value)`, in the common dtype of `q`, `k` and `v`, and the last
    state. The state is in single precision at least, and so are all sums.

    **Derivative:**

    Reverse mode keeps the arguments and one state for each chunk, and recomputes a chunk from
    its state. The derivation is in `eqx_grads/_control_flow/delta_rule.py`. Nothing is divided
    by a decay or by `beta`, so both may be zero. Forward mode differentiates the chunks.
    Both modes, all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if the shapes do not fit together, a number is complex, or
    `chunk` is not a positive integer.

    ??? cite

        [Gated Delta Networks: Improving Mamba2 with Delta
        Rule](https://arxiv.org/abs/2412.06464)

        ```bibtex
        @inproceedings{yang2025gated,
            author={Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali},
            title={Gated Delta Networks: Improving {Mamba2} with Delta Rule},
            booktitle={International Conference on Learning Representations},
            year={2025},
        }
        ```
    """
    check_flags("gated_delta_rule", delta=delta, reverse=reverse)
    arrays = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay, "scale": scale}
    *xs, factor, first = _fit(**arrays, state=state)
    dtype, (steps, *axes) = promote(xs[:3]), xs[3].shape
    xs = zero_padding("gated_delta_rule", xs, lengths)
    chunk = _chunk_of(chunk, steps)
    if reverse:
        xs = [jnp.flip(x, 0) for x in xs]
    q, k, v, beta, decay = (_to_chunks(x, chunk, x.ndim - len(axes) - 1) for x in xs)
    out, last = _delta_rule(q, k, v, beta, decay, first, delta=bool(delta))
    out = jnp.moveaxis(out, -2, 1)
    out = out.reshape(out.shape[0] * chunk, *out.shape[2:])[:steps]
    out = (factor * out).astype(dtype)
    # Zero already, but an infinite cotangent has to end here.
    (out,) = zero_padding("gated_delta_rule", [jnp.flip(out, 0) if reverse else out], lengths)
    return out, last


_DEFAULTS = {"decay": 0.0, "scale": 1.0, "state": 0.0}


def _fit(**given):
    """The arguments with all of their axes. The state has the dtype of all sums."""
    is_given = {name for name, x in given.items() if x is not None}
    given = {name: _DEFAULTS.get(name) if x is None else x for name, x in given.items()}
    given = as_arrays("gated_delta_rule", given, real=True)
    wide = promote([*given.values(), jnp.float32])
    float_ = lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(wide)
    q, k, v, beta, decay, scale, state = map(float_, given.values())
    shape = _shape(q, k, v, beta, decay, state)
    if shape is None or scale.ndim > 0:
        raise rule_error(
            "The arguments of `gated_delta_rule` do not fit together.",
            *(f"`{name}` is {type_of(given[name])}" for name in given if name in is_given),
            do="`q` and `k` have the shape `(time, ..., key)`, `v` has `(time, ..., value)`, "
            "`beta` and `decay` have `(time, ...)` or are numbers, `state` has `(..., key, "
            "value)`, and `scale` is a number.",
        )
    *axes, _, _ = shape
    q, k, v = (jnp.broadcast_to(x, (*axes, x.shape[-1])) for x in (q, k, v))
    beta, decay = (jnp.broadcast_to(x, axes) for x in (beta, decay))
    # As for the product, for its sharding over explicit axes and its type in `jax.shard_map`.
    of_time = lambda x: jnp.sum(x[:1], 0).astype(wide)
    zero = jnp.zeros_like(of_time(k)[..., None] * of_time(v)[..., None, :])
    state = zero + jnp.broadcast_to(state.astype(wide), shape[1:])
    return q, k, v, beta, decay, scale.astype(wide), state


def _shape(q, k, v, beta, decay, state):
    """`(time, ..., key, value)`, or `None` if the arguments do not fit together."""
    n = q.ndim - 1
    # With fewer axes, the time of one would meet the heads of another.
    if n < 1 or {n + 1} != {k.ndim, v.ndim} or not {beta.ndim, decay.ndim} <= {0, n}:
        return None
    try:
        axes = [*(x.shape[:-1] for x in (q, k, v)), beta.shape, decay.shape]
        shape = (*jnp.broadcast_shapes(*axes), k.shape[-1], v.shape[-1])
        fits = jnp.broadcast_shapes(state.shape, shape[1:]) == shape[1:]
        fits = fits and q.shape[-1] == k.shape[-1]
    except ValueError:
        return None
    return shape if fits else None


def _chunk_of(chunk, steps):
    if chunk is None:
        chunk = steps_of_delta_rule()
    chunk = as_count("gated_delta_rule", "chunk", chunk)
    # Nothing but one is known to divide a symbolic number of steps.
    return 1 if is_symbolic(steps) else max(1, min(chunk, steps))


def _to_chunks(x, chunk, n_features):
    """`(time, ..., features)` as `(chunks, ..., steps, features)`, with steps of zeros, which
    do not change the state, where the last chunk is shorter."""
    if chunk > 1:
        x = jnp.pad(x, [(0, -x.shape[0] % chunk)] + [(0, 0)] * (x.ndim - 1))
    x = x.reshape(x.shape[0] // chunk, chunk, *x.shape[1:])
    return jnp.moveaxis(x, 1, -1 - n_features)


# Forward, for one head and one chunk. Let $S$ be the state before the chunk, $c_i$ the sum of
# the log-decays from the start of the chunk to step i, and $E_ij = exp(c_i - c_j)$ for i >= j.
# With the steps as rows of Q, K, V, U, O, the recurrence is the "WY form"
#
#     U = beta (V - e K S - B U)    B = strict lower part of E * K K^T    e_i = exp(c_i)
#     O = e Q S + P U               P = lower part of E * Q K^T
#     S' = e_C S + (f K)^T U        f_j = E_Cj, of the last step C
#
# The first line is a triangular system, U = M beta (V - e K S) with M = (I + beta B)^-1. What
# does not depend on S (E, B, P, M) is computed for all chunks at once. Without the delta term,
# U = beta V.
#
# Backward, with a bar for a cotangent, from the last chunk to the first:
#
#     U' = P^T O' + f K S'          R' = M^T U'       (the cotangent of beta (V - e K S))
#     V' = beta R'                  beta'_i = R'_i Z_i,    Z = V - e K S - B U
#     P' = O' U^T                   B' = -V' U^T      (U' enters B through the system)
#     S  <- e_C S' + Q^T (e O') - K^T (e V')
#     Q' = e O' S^T + (E P') K      K' = (E P')^T Q + (E B' + (E B')^T) K + f U S'^T - e V' S^T
#
# Each E_ij is the exponential of the sum of g_l over j < l <= i, so that E E' is the cotangent
# L' of that sum. e_i is in the first column, times exp(g_1); f and e_C are in the last row.


@custom_vjp
def _delta_rule(q, k, v, beta, g, s, *, delta):
    """Outputs and last state. Arrays are `(chunks, ..., steps, features)`."""
    return _run(q, k, v, beta, g, s, delta)[:2]


@compile_eager_calls
def _run(q, k, v, beta, g, s, delta):
    """And the states before each chunk."""
    chunks = [x.astype(s.dtype) for x in (q, k, v, beta, g)]

    def step(s, x):
        (q, k, v, beta, _), (decays, e, _, p, inverse) = x
        u = _write(k, v, beta, s, e, inverse)[1]
        out = e * (q @ s) + p @ u
        end = e[..., -1:, :] * s + (decays[..., -1, :, None] * k).mT @ u
        return end, (out, s)

    last, (out, states) = jax.lax.scan(step, s, (chunks, _within(chunks, delta)))
    return out, last, states


def _write(k, v, beta, s, e, inverse):
    """V - e K S, and U."""
    if inverse is None:
        return v, beta[..., None] * v
    z = v - e * (k @ s)
    return z, inverse @ (beta[..., None] * z)


def _within(chunks, delta):
    """What does not depend on the state: E, e, B, P, M."""
    q, k, _, beta, g = chunks
    lower, strict = _masks(g)
    decays = jnp.where(lower, jnp.exp(_sums_between(g)), 0)
    e = decays[..., :, :1] * jnp.exp(g[..., :1, None])
    p = jnp.where(lower, decays * (q @ k.mT), 0)
    if not delta:
        return decays, e, None, p, None
    b = jnp.where(strict, decays * (k @ k.mT), 0)
    return decays, e, b, p, _inverse(beta[..., None] * b)


def _masks(g):
    ones = jnp.ones((g.shape[-1], g.shape[-1]), bool)
    return jnp.tril(ones), jnp.tril(ones, -1)


# Not differences of cumulative sums, which lose the digits of a small decay after a large one.
def _sums_between(g):
    """The sum of g_l over j < l <= i, for all i and j."""
    lower, strict = _masks(g)
    # The exponential of the bound is zero in all dtypes, and infinity times zero is NaN.
    terms = jnp.where(strict, jnp.maximum(g, -1e4)[..., :, None], 0)
    return jnp.matmul(lower.astype(g.dtype), terms, precision=jax.lax.Precision.HIGHEST)


def _pull_back_sums(ct):
    """The cotangent of g."""
    lower, strict = _masks(ct)
    ct = jnp.matmul(lower.T.astype(ct.dtype), ct, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(jnp.where(strict, ct, 0), -1)


def _inverse(a):
    """The inverse of I + `a`, strictly lower triangular: in halves, which is stable."""
    n = a.shape[-1]
    if n == 1:
        return jnp.ones_like(a)
    if n % 2 == 1:
        pad = [(0, 0)] * (a.ndim - 2) + [(0, 1)] * 2
        return _inverse(jnp.pad(a, pad))[..., :n, :n]
    half, matmul = n // 2, lambda x, y: jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
    first, second = _inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -matmul(second, matmul(a[..., half:, :half], first))
    return jnp.block([[first, jnp.zeros_like(corner)], [corner, second]])


@_delta_rule.def_fwd
def _delta_rule_fwd(q, k, v, beta, g, s, *, delta):
    out, last, states = _run(q, k, v, beta, g, s, delta)
    return (out, last), (q, k, v, beta, g, states)


@_delta_rule.def_bwd
@compile_eager_calls
def _delta_rule_bwd(residuals, ct, *, delta):
    *chunks, states = residuals
    chunks = [x.astype(states.dtype) for x in chunks]

    def step(ct_s, x):
        (q, k, v, beta, g), (decays, e, b, p, inverse), s, ct_out = x
        lower, strict = _masks(g)
        f = decays[..., -1, :, None]
        z, u = _write(k, v, beta, s, e, inverse)
        ct_u = p.mT @ ct_out + f * (k @ ct_s)
        ct_p = jnp.where(lower, ct_out @ u.mT, 0)
        ct_qs = e * ct_out
        ct_q_s, ct_k_end = ct_qs @ s.mT, f * (u @ ct_s.mT)
        ct_k = (decays * ct_p).mT @ q + ct_k_end
        ct_sums, ct_c = p * ct_p, jnp.sum(q * ct_q_s, -1)
        before = e[..., -1:, :] * ct_s + q.mT @ ct_qs
        if delta:
            z, ct_u = z - b @ u, inverse.mT @ ct_u
        ct_v = beta[..., None] * ct_u
        if delta:
            ct_b = -jnp.where(strict, ct_v @ u.mT, 0)
            ct_k_s, ct_kk = (e * ct_v) @ s.mT, decays * ct_b
            ct_k = ct_k + (ct_kk + ct_kk.mT) @ k - ct_k_s
            ct_sums, ct_c = ct_sums + b * ct_b, ct_c - jnp.sum(k * ct_k_s, -1)
            before = before - k.mT @ (e * ct_v)
        ct_c = ct_c.at[..., -1].add(e[..., -1, 0] * jnp.sum(s * ct_s, (-2, -1)))
        ct_sums = ct_sums.at[..., -1, :].add(jnp.sum(k * ct_k_end, -1))
        ct_g = _pull_back_sums(ct_sums.at[..., 0].add(ct_c))
        ct_g = ct_g.at[..., 0].add(jnp.sum(ct_c, -1))
        ct_q = ct_q_s + (decays * ct_p) @ k
        return before, (ct_q, ct_k, ct_v, jnp.sum(z * ct_u, -1), ct_g)

    xs = (chunks, _within(chunks, delta), states, ct[0])
    ct_s, cts = jax.lax.scan(step, ct[1], xs, reverse=True)
    return *cts, ct_s
