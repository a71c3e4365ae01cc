"""A scan in windows that no derivative passes between: truncated backpropagation.

Let `(h_{t+1}, y_t) = f(W, h_t, x_t)` run in windows of `k` steps. The cotangents `d_t` of the
carries `h_t` obey

    d_t = (dh_{t+1}/dh_t)^T d_{t+1} + (dy_t/dh_t)^T ct_y_t,

and truncation replaces `d_{t+1}` by zero where step `t + 1` is the first of a window. So no
window needs the cotangent of a later one. The backward pass runs the windows in the order in
which they ran forward: it computes each once more from its first carry, and pulls the
cotangents of its outputs back at once. From window to window it carries `h` and the sum of the
cotangents of `W`, and it saves nothing of the forward pass, however many steps there are.

The cotangent of the last carry belongs to the last window only, which is run apart; that of
the first carry comes from the first window.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.operands import replace, select
from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import add_terms, is_differentiable, sum_dtype
from .scan_backward import AbstractMethod, Loop
from .traced_body import TracedBody


@dataclasses.dataclass(frozen=True)
class Truncated(AbstractMethod):
    """Save nothing, and recompute one window after another, each by the method `inner`."""

    inner: AbstractMethod
    window: int

    def unsupported(self, loop: Loop) -> str | None:
        return loop.why_not_again or self.inner.unsupported(loop)

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        body, consts, init = loop.traced
        return truncated_scan(
            consts,
            init,
            loop.xs,
            loop.step_index,
            body=body,
            method=self,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )


def cut_loop(loop: Loop, window: int) -> Loop:
    """The loop, with a body that cuts the derivative of its carry at the start of each window.

    The same derivative as that of `Truncated`, in the program of the steps themselves: nothing
    is recomputed, and so everything is saved.
    """
    return dataclasses.replace(loop, body=_CutBody(loop.body, window), counts=True)


@dataclasses.dataclass(frozen=True)
class _CutBody:
    body: Callable[..., Any]
    window: int

    def __call__(self, carry, x):
        index, x = x
        cut = (index % self.window == 0) & (index > 0)
        return self.body([cut_where(cut, c) for c in carry], x)


def cut_where(cut, carry):
    """No derivative passes where `cut`; also none that is NaN."""
    if not is_differentiable(carry):
        return carry
    with jax.named_scope(TRUNCATION):
        return jnp.where(cut, jax.lax.stop_gradient(carry), carry)


TRUNCATION = "eqg_truncate"  # in the name stack of what cuts the derivative


@custom_vjp
def truncated_scan(
    consts: list[Any],
    init: list[Any],
    xs: list[Any],
    step_index: Any,
    *,
    body: TracedBody,
    method: Truncated,
    reverse: bool,
    unroll: int | bool,
):
    """The last carry, and all `ys`. There are more steps than in one window."""
    run = ft.partial(_run_window, body=body, method=method, reverse=reverse, unroll=unroll)

    def one(carry, inputs):
        return run(consts, _cut_unless_first(carry, inputs), inputs)

    remainder = step_index.shape[0] % method.window
    windows, last = _split((step_index, xs), method.window, remainder, reverse)
    carry, ys = jax.lax.scan(one, init, windows, reverse=reverse)
    if last is None:
        return carry, _join(ys, None, reverse)
    carry, last_ys = one(carry, last)
    return carry, _join(ys, last_ys, reverse)


def _run_window(consts, carry, inputs, *, body, method, reverse, unroll):
    index, xs = inputs
    loop = Loop(
        ft.partial(body, consts),
        carry,
        xs,
        index.shape[0],
        reverse,
        unroll,
        closed=(body, consts),
    )
    return method.inner.run(loop)


def _cut_unless_first(carry, inputs):
    """The carry that enters a window."""
    is_first = jnp.min(inputs[0]) == 0
    return [cut_where(~is_first, c) for c in carry]


def _split(xs, window, last, reverse):
    """All windows, and the `last` steps, which are run after them; `None` if there are none."""
    if last == 0:
        full, short = xs, None
    elif reverse:
        full, short = jax.tree.map(lambda x: x[last:], xs), jax.tree.map(lambda x: x[:last], xs)
    else:
        full = jax.tree.map(lambda x: x[:-last], xs)
        short = jax.tree.map(lambda x: x[-last:], xs)
    n = (jax.tree.leaves(xs)[0].shape[0] - last) // window
    return jax.tree.map(lambda x: x.reshape(n, window, *x.shape[1:]), full), short


def _join(full, last, reverse):
    full = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), full)
    if last is None:
        return full
    parts = (last, full) if reverse else (full, last)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *parts)


# `ScanBody.varying_arrays` has cast the operands, and a constant must stay as `body` has it.
truncated_scan._rules.varies_alike = False


@truncated_scan.def_fwd
def _truncated_scan_fwd(
    consts, init, xs, step_index, *, body, perturbed: tuple[Any, ...], **options
):
    *perturbed_args, _ = perturbed
    values = body.with_values_of_rules(*perturbed_args)
    out = truncated_scan(consts, init, xs, step_index, body=values, **options)
    return out, (consts, init, xs, step_index)


@truncated_scan.def_bwd(symbolic_zeros=True)
def _truncated_scan_bwd(
    residuals, cts, *, body, method, reverse, unroll, perturbed: tuple[Any, ...]
):
    consts, init, xs, step_index = residuals
    ct_last, ct_ys = cts
    *perturbed_args, _ = perturbed
    ct_ys = {j: ct for j, ct in enumerate(ct_ys) if ct is not None}
    ct_last = {i: ct for i, ct in enumerate(ct_last) if ct is not None}
    run = ft.partial(_run_window, body=body, method=method, reverse=reverse, unroll=unroll)
    pull_back = ft.partial(_pull_back_window, run, consts)

    # The cotangent of the last carry belongs to the last window only.
    n_last = step_index.shape[0] % method.window
    n_last = method.window if n_last == 0 and ct_last else n_last
    inputs = (step_index, xs, ct_ys)
    windows, last = _split(inputs, method.window, n_last, reverse)

    def one(state, inputs):
        carry, sums, ct_init = state
        index, x, ct_y = inputs
        carry, cts = pull_back(carry, index, x, {}, ct_y, perturbed_args)
        terms, ct_carry, ct_x = cts
        is_first = jnp.min(index) == 0
        ct_init = [jnp.where(is_first, a, b) for a, b in zip(ct_carry, ct_init, strict=True)]
        return (carry, add_terms(sums, terms), ct_init), ct_x

    perturbed_values = select(perturbed_args, (consts, init, xs))
    sums = [jnp.zeros_like(c, sum_dtype(c.dtype)) for c in perturbed_values[0]]
    start = (init, sums, jax.tree.map(jnp.zeros_like, perturbed_values[1]))
    (carry, sums, ct_init), ct_xs = jax.lax.scan(one, start, windows, reverse=reverse)
    last_ct_x = None
    if last is not None:
        index, x, ct_y = last
        perturbed_consts, _, perturbed_xs = perturbed_args
        all_but_carry = (perturbed_consts, [False] * len(init), perturbed_xs)
        _, cts = pull_back(carry, index, x, ct_last, ct_y, all_but_carry)
        terms, _, last_ct_x = cts
        sums = add_terms(sums, terms)
    ct_xs = _join(ct_xs, last_ct_x, reverse)
    nothing = tuple([None] * len(part) for part in perturbed_args)
    return *replace(nothing, perturbed_args, (sums, ct_init, ct_xs)), None


def _pull_back_window(run, consts, carry, index, x, ct_carry, ct_y, perturbed):
    """Run a window once more, and pull the cotangents of what it returns back through it.

    Returns the next carry, and the cotangents of those `consts`, `carry` and `x` that are
    `perturbed`. `ct_carry` and `ct_y` are dictionaries by index.
    """
    carry = _cut_unless_first(carry, (index, x))  # in the derivatives of this derivative

    def of_perturbed(values):
        consts_now, carry_now, x_now = replace((consts, carry, x), perturbed, values)
        new, ys = run(consts_now, carry_now, (index, x_now))
        return ([new[i] for i in ct_carry], [ys[j] for j in ct_y]), new

    values = select(perturbed, (consts, carry, x))
    if not ct_carry and not ct_y:
        return of_perturbed(values)[1], jax.tree.map(jnp.zeros_like, values)
    _, pull_back, new = jax.vjp(of_perturbed, values, has_aux=True)
    (cts,) = pull_back((list(ct_carry.values()), list(ct_y.values())))
    return new, cts


@truncated_scan.def_vmap
def _truncated_scan_vmap(size, batched, *args, **options):
    return options.pop("body").scan_of_batch(truncated_scan, size, batched, *args, **options)
