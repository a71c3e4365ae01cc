"""A scan whose backward pass replays the steps side by side.

Only the carries are kept. Given these, no step needs the one before it any more: the backward
pass computes the insides of a whole chunk of steps again at once, which makes one large matrix
product of many small ones, and does one after another only what the cotangent of the carry
needs (`replay_split.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import is_differentiable, sum_dtype
from .chunked_scan import before, chunk_entries, near_divisor, scan_in_chunks
from .replay_cost import is_replay_faster, rows
from .replay_split import Pieces


@custom_vjp
def replayed_scan(step, consts, init, xs, *, reverse, always, progress):
    """The last carry, and all `ys`.

    All but `step` are lists of arrays, and `xs` starts with the number of steps done. If not
    `always`, the backward pass is that of a plain scan where this is likely to be faster.
    """
    del always
    return _run(lambda c, x: step(consts, c, x), init, xs, reverse, progress)


def _run(body, init, xs, reverse, progress):
    run = lambda carry, xs: jax.lax.scan(body, carry, xs, reverse=reverse)
    if progress is None:
        return run(init, xs)

    def one_chunk(carry, xs, _):
        out = run(carry, xs)
        progress.report(xs[0])
        return out

    chunk = near_divisor(xs[0].shape[0], progress.every)
    return scan_in_chunks(one_chunk, init, xs, chunk=chunk, reverse=reverse)


@replayed_scan.def_fwd
def _replayed_scan_fwd(
    step, consts, init, xs, *, reverse, always, progress, perturbed: tuple[Any, ...]
):
    _, *wanted = perturbed
    if not always and not is_replay_faster(step, xs[0].shape[0], wanted[0]):
        out, residuals = _plain_vjp(step, consts, init, xs, reverse, progress, wanted)
        return out, (residuals, None)
    y_of_carry = step.y_of_carry()
    # A carry that is also an output is kept once.
    unless_y = lambda carry: [
        c if j is None else None for c, j in zip(carry, y_of_carry, strict=True)
    ]

    def body(carry, x):
        new, y = step(consts, carry, x)
        return new, (y, unless_y(carry))

    last, (ys, carries) = _run(body, init, xs, reverse, progress)
    after = [y if j in y_of_carry else None for j, y in enumerate(ys)]
    first = [c if j is not None else None for c, j in zip(init, y_of_carry, strict=True)]
    return (last, ys), (None, (step, consts, xs, after, carries, first))


def _plain_vjp(step, consts, init, xs, reverse, progress, wanted):
    leaves, treedef = jax.tree.flatten((consts, init, xs))
    live = [i for i, want in enumerate(jax.tree.leaves(wanted)) if want]

    def of_live(values):
        full = list(leaves)
        for i, value in zip(live, values, strict=True):
            full[i] = value
        consts, init, xs = jax.tree.unflatten(treedef, full)
        out = _run(lambda c, x: step(consts, c, x), init, xs, reverse, progress)
        return jax.tree.map(lambda x: x if is_differentiable(x) else None, out), out

    floats, pull, out = jax.vjp(of_live, [leaves[i] for i in live], has_aux=True)
    return out, (pull, floats)


@replayed_scan.def_bwd(symbolic_zeros=True)
def _replayed_scan_bwd(residuals, cts, *, reverse, perturbed: tuple[Any, ...]):
    _, *wanted = perturbed
    plain, replayed = residuals
    if plain is not None:
        pull, floats = plain
        return None, *_pull_plain(pull, floats, cts, wanted)
    return None, *_replay(replayed, cts, wanted, reverse)


def _pull_plain(pull, floats, cts, wanted):
    """All of it in JAX's hands, which wants zeros for what is not used."""
    dense = lambda x, ct: None if x is None else jnp.zeros_like(x) if ct is None else ct
    (live,) = pull(jax.tree.map(dense, floats, cts, is_leaf=lambda x: x is None))
    flags, treedef = jax.tree.flatten(wanted)
    places = [i for i, want in enumerate(flags) if want]
    return jax.tree.unflatten(treedef, at_places(places, live, len(flags)))


def _replay(residuals, cts, wanted, reverse):
    step, consts, xs, ys, carries, first = residuals
    ct_last, ct_ys = cts
    want_consts, _, want_xs = wanted
    y_of_carry = step.y_of_carry()
    carried = step.carried(*wanted)
    places = [i for i in step.differentiable() if carried[i]]
    used = [j for j, ct in enumerate(ct_ys) if ct is not None]
    pieces = Pieces(step, places, used, want_consts, want_xs)

    def one_chunk(carry, inputs, entry):
        x, y, kept, ct_y = inputs
        carries = [
            kept_i if j is None else before(y[j], entry_i, reverse=reverse)
            for kept_i, entry_i, j in zip(kept, entry, y_of_carry, strict=True)
        ]
        return pieces.pull_back(carry, consts, carries, x, ct_y, reverse=not reverse)

    def zero(i):
        j = y_of_carry[i]
        return jnp.zeros_like(carries[i][0] if j is None else ys[j][0])

    d = [zero(i) if ct_last[i] is None else ct_last[i] for i in places]
    summed = [i for i, want in enumerate(want_consts) if want]
    sums = [jnp.zeros_like(consts[i], sum_dtype(consts[i].dtype)) for i in summed]
    chunk = _chunk(step, xs)
    entries = [
        None if j is None else chunk_entries(ys[j], c, chunk=chunk, reverse=reverse)
        for c, j in zip(first, y_of_carry, strict=True)
    ]
    (d, sums), ct_xs = scan_in_chunks(
        one_chunk,
        (d, sums),
        (xs, ys, carries, [ct_ys[j] for j in used]),
        entries,
        chunk=chunk,
        reverse=not reverse,
    )
    return (
        at_places(summed, sums, len(consts)),
        at_places(places, d, len(ct_last)),
        at_places([i for i, want in enumerate(want_xs) if want], ct_xs, len(xs)),
    )


def _chunk(step, xs):
    """Enough rows for a matrix product to be efficient, few enough to stay in the cache."""
    return near_divisor(xs[0].shape[0], min(64, max(16, 256 // max(rows(step), 1))))


def at_places(places, values, n):
    """A list of `n`, with these values at these places, and `None` elsewhere."""
    out: list[Any] = [None] * n
    for i, value in zip(places, values, strict=True):
        out[i] = value
    return out


@replayed_scan.def_vmap
def _replayed_scan_vmap(*args, **options):
    return scan_of_batch(replayed_scan, *args, **options)


def scan_of_batch(scan, size, batched, step, consts, init, xs, **options):
    """The same `scan` of the step for the whole batch: the sum over the batch then is part of
    the matrix products."""
    _, b_consts, b_init, b_xs = batched
    if b_xs[0]:
        return NotImplemented
    carried = step.carried(b_consts, b_init, b_xs)
    init = [
        jnp.broadcast_to(c[None], (size, *c.shape)) if b and not was else c
        for c, b, was in zip(init, carried, b_init, strict=True)
    ]
    xs = [jnp.moveaxis(x, 0, 1) if b else x for x, b in zip(xs, b_xs, strict=True)]
    step = step.batched(size, (b_consts, carried, b_xs), consts, init, xs)
    last, ys = scan(step, consts, init, xs, **options)
    return (last, [jnp.moveaxis(y, 1, 0) for y in ys]), (carried, True)
