"""A scan in windows that no derivative passes between: truncated backpropagation.

As no window needs the cotangent of a later one, the backward pass can go through them in the
order in which they ran, and compute each once more. It then keeps nothing of the forward pass,
however many steps there are.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import is_differentiable, sum_dtype
from .replay import scan_of_batch
from .replay_split import add_terms


@custom_vjp
def truncated_scan(step, consts, init, xs, *, window, remember, reverse, progress):
    """The last carry, and all `ys`. All but `step` are lists of arrays, and `xs` starts with
    the number of steps done. There are more steps than in one `window`.

    `remember(step, consts, carry, xs)` runs the steps of one window, with the derivative that
    is wanted there.
    """

    def one(carry, x):
        carry, ys = remember(step, consts, _cut(carry, x), x)
        if progress is not None:
            progress.report(x[0])
        return carry, ys

    windows, rest = _split(xs, window, xs[0].shape[0] % window, reverse)
    carry, ys = jax.lax.scan(one, init, windows, reverse=reverse)
    if rest is None:
        return carry, _join(ys, None, reverse)
    carry, rest = one(carry, rest)
    return carry, _join(ys, rest, reverse)


def _cut(carry, x):
    """What enters a window."""
    is_first = jnp.min(x[0]) == 0
    return [cut_where(~is_first, c) for c in carry]


def cut_where(cut, carry):
    """No derivative passes where `cut`; also none that is NaN."""
    if not is_differentiable(carry):
        return carry
    return jnp.where(cut, jax.lax.stop_gradient(carry), carry)


def _split(xs, window, rest, reverse):
    """All windows but the `rest` of the steps, which is run last."""
    if rest == 0:
        full, short = xs, None
    elif reverse:
        full, short = jax.tree.map(lambda x: x[rest:], xs), jax.tree.map(lambda x: x[:rest], xs)
    else:
        full = jax.tree.map(lambda x: x[:-rest], xs)
        short = jax.tree.map(lambda x: x[-rest:], xs)
    n = (jax.tree.leaves(xs)[0].shape[0] - rest) // window
    return jax.tree.map(lambda x: x.reshape(n, window, *x.shape[1:]), full), short


def _join(full, short, reverse):
    full = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), full)
    if short is None:
        return full
    parts = (short, full) if reverse else (full, short)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *parts)


@truncated_scan.def_fwd
def _truncated_scan_fwd(step, consts, init, xs, **options):
    return truncated_scan(step, consts, init, xs, **options), (step, consts, init, xs)


@truncated_scan.def_bwd(symbolic_zeros=True)
def _truncated_scan_bwd(
    residuals, cts, *, window, remember, reverse, progress, perturbed: tuple[Any, ...]
):
    del progress
    step, consts, init, xs = residuals
    ct_last, ct_ys = cts
    _, *wanted = perturbed
    used = {j: ct for j, ct in enumerate(ct_ys) if ct is not None}
    given = {i: ct for i, ct in enumerate(ct_last) if ct is not None}

    def pull(carry, x, ct_carry, ct_y, wanted):
        """Once more through a window, with the cotangents of what it returns, by place.

        The next carry, and the cotangents of those `consts`, `carry` and `x` that are wanted.
        """
        carry = _cut(carry, x)  # for the derivatives of this one

        def run(live):
            consts_now, carry_now, x_now = _replaced((consts, carry, x), wanted, live)
            new, ys = remember(step, consts_now, carry_now, x_now)
            return ([new[i] for i in ct_carry], [ys[j] for j in ct_y]), new

        live = _those(wanted, (consts, carry, x))
        if not ct_carry and not ct_y:
            return run(live)[1], jax.tree.map(jnp.zeros_like, live)
        _, pull_back, new = jax.vjp(run, live, has_aux=True)
        (ct_live,) = pull_back((list(ct_carry.values()), list(ct_y.values())))
        return new, ct_live

    # The cotangent of the last carry belongs to the last window only.
    rest = xs[0].shape[0] % window
    rest = window if rest == 0 and given else rest
    windows, last = _split((xs, used), window, rest, reverse)

    def one(state, inputs):
        carry, sums, ct_init = state
        x, ct_y = inputs
        carry, (terms, ct_carry, ct_x) = pull(carry, x, {}, ct_y, wanted)
        is_first = jnp.min(x[0]) == 0
        ct_init = [jnp.where(is_first, a, b) for a, b in zip(ct_carry, ct_init, strict=True)]
        return (carry, add_terms(sums, terms), ct_init), ct_x

    live_consts, live_init, _ = _those(wanted, (consts, init, xs))
    sums = [jnp.zeros_like(c, sum_dtype(c.dtype)) for c in live_consts]
    start = (init, sums, jax.tree.map(jnp.zeros_like, live_init))
    (carry, sums, ct_init), ct_xs = jax.lax.scan(one, start, windows, reverse=reverse)
    ct_rest = None
    if last is not None:
        x, ct_y = last
        want_consts, _, want_xs = wanted
        not_carry = (want_consts, [False] * len(init), want_xs)
        _, (terms, _, ct_rest) = pull(carry, x, given, ct_y, not_carry)
        sums = add_terms(sums, terms)
    ct_xs = _join(ct_xs, ct_rest, reverse)
    return None, *_placed((sums, ct_init, ct_xs), wanted)


def _those(flags, parts):
    """The values with a flag, in each part."""
    select = lambda values, flags: [v for v, flag in zip(values, flags, strict=True) if flag]
    return tuple(map(select, parts, flags))


def _replaced(parts, flags, new):
    """The parts, with new values where there is a flag."""

    def replace(values, flags, new):
        new = iter(new)
        return [next(new) if flag else v for v, flag in zip(values, flags, strict=True)]

    return tuple(map(replace, parts, flags, new))


def _placed(parts, flags):
    """The values at the places with a flag, and `None` elsewhere."""
    return _replaced(tuple([None] * len(part) for part in flags), flags, parts)


@truncated_scan.def_vmap
def _truncated_scan_vmap(*args, **options):
    return scan_of_batch(truncated_scan, *args, **options)
