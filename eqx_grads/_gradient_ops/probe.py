"""See the gradient at a point of a program: `probe`, `tap_gradient`, `watch_gradient`."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .._errors import (
    bad_argument,
    check_flags,
    check_function,
    rule_error,
    show_path,
    type_of,
)
from .._jaxprs.varying import vary_alike
from .._rules.custom_jvp import custom_jvp
from .._rules.custom_vjp import custom_vjp
from .._rules.float_args import as_integer
from .._tangent_spaces import (
    dtype_of_array,
    is_differentiable,
    is_none,
    is_zero_leaf,
    match_leaves,
    tangents_match,
)
from .._trees import leaf_paths, on_leaves
from ..tangents import add
from .norms import norm
from .on_backward import on_backward


class GradientStatistics(eqx.Module):
    r"""A slot for [`eqx_grads.probe`][] that records statistics instead of the whole gradient.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def loss(slots, h):
            def step(h, slot):
                return eqg.probe(2 * h, slot), None

            return jnp.sum(jax.lax.scan(step, h, slots)[0])

        statistics = jax.grad(loss)(eqg.GradientStatistics(3), jnp.ones(4))
        print(statistics.norm)  # one per step
        print(f"{statistics.mean_norm:.3f}")

        # One slot for all steps: the statistics of the steps are summed.
        def loss_of_one(slot, h):
            slots = jax.tree.map(lambda s: jnp.broadcast_to(s, (3,)), slot)
            return loss(slots, h)

        statistics = jax.grad(loss_of_one)(eqg.GradientStatistics(), jnp.ones(4))
        print(statistics.norm, statistics.steps)
        print(f"{statistics.mean_norm:.3f}")
        ```

        ```text
        [8. 4. 2.]
        4.667
        14.0 3.0
        4.667
        ```

    **Arguments:**

    - `n`: the shape of the fields: a number of steps (or a tuple of numbers), for slots that
        are scanned over (or `vmap`ped). By default, a single slot.

    The fields of the slot are zeros. The fields of its gradient are statistics of the
    gradient of `x`, over all its leaves:

    - `norm`: the 2-norm of the finite elements.
    - `max`: the largest magnitude of the finite elements.
    - `nonfinite`: how many elements are NaN or infinite.
    - `steps`: one, the number of gradients.

    You may use one slot several times: in a scan that closes over it, or for a batched `x` with
    an unbatched slot. Each field is then the sum over the uses, and `steps` is their number.
    """

    norm: Float[Array, "*n"]
    max: Float[Array, "*n"]
    nonfinite: Float[Array, "*n"]
    steps: Float[Array, "*n"]

    def __init__(self, n: int | tuple[int, ...] = ()):
        shape = n if isinstance(n, tuple) else (n,)
        known = [as_integer(m) for m in shape]
        if any(m is None or not 0 <= m < 2**31 for m in known):
            do = "Give an integer that is not negative, or a tuple of them."
            raise bad_argument("GradientStatistics", "n", "a number of steps", n, do)
        self.norm = self.max = self.nonfinite = self.steps = jnp.zeros(known)

    @property
    def mean_norm(self) -> Float[Array, ""]:
        """The mean of `norm` over all steps. Zero if there was no gradient."""
        return jnp.sum(self.norm) / jnp.maximum(jnp.sum(self.steps), 1)

    @property
    def mean_max(self) -> Float[Array, ""]:
        """The mean of `max` over all steps. Zero if there was no gradient."""
        return jnp.sum(self.max) / jnp.maximum(jnp.sum(self.steps), 1)


def probe(x: PyTree, slot: PyTree) -> PyTree:
    r"""Expose the gradient of `x` as the gradient of `slot`.

    A slot acts as a zero perturbation that is added to `x`, as in Flax's `perturb`. In a scan,
    a slot that is scanned over has one gradient for each step. The gradient of a slot that the
    scan closes over is the sum over the steps.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def loss(slots, h):
            def step(h, slot):
                return eqg.probe(2 * h, slot), None

            return jax.lax.scan(step, h, slots)[0]

        print(jax.grad(loss)(jnp.zeros(3), 1.0))
        ```

        ```text
        [4. 2. 1.]
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `slot`: a tree like `x` of arrays of the same shapes, such as `jnp.zeros_like(x)`, with
        `None` for any part that is not of interest. Its values are ignored. Or a
        [`eqx_grads.GradientStatistics`][], to record statistics instead of the gradient.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    The derivative of $y = x + \mathrm{slot}$: $\dot y = \dot x + \dot{\mathrm{slot}}$ and
    $\bar x = \overline{\mathrm{slot}} = \bar y$. Linear, so both modes and all orders; the
    Hessian with respect to a slot is the Hessian with respect to `x`. For a
    `GradientStatistics`, forward mode is the identity in `x`, and in the reverse rule
    $\overline{\mathrm{slot}}$ is the statistics of $\bar y$.

    **Raises:**

    [`eqx_grads.RuleError`][] if `slot` is of another structure or shape than `x`.
    """
    if isinstance(slot, GradientStatistics):
        if np.shape(slot.norm) != ():
            raise rule_error(
                "`probe` was given several slots for one gradient.",
                f"`slot` is a `GradientStatistics` of shape {np.shape(slot.norm)}",
                do="Scan over it, and give `probe` the slot of each step; or make one slot "
                "with `GradientStatistics()`, which sums over all steps.",
            )
        return on_leaves(lambda leaves: _probe_statistics(leaves, slot), x)
    leaves, slots = _match_slots(x, slot)
    return jax.tree.unflatten(jax.tree.structure(x, is_leaf=is_none), _probe(leaves, slots))


def _match_slots(x, slot):
    """The leaves of `x`, and one slot for each of them: an array or `None`."""
    slots = match_leaves(slot, x, "slot", _does_not_fit)
    leaves = jax.tree_util.tree_leaves_with_path(x, is_leaf=is_none)
    out = [leaf for _, leaf in leaves]
    for i, (s, (path, leaf)) in enumerate(zip(slots, leaves, strict=True)):
        if s is None or not is_differentiable(leaf):
            slots[i] = None  # such a leaf has no gradient
            continue
        is_complex = jnp.iscomplexobj(s), jnp.iscomplexobj(leaf)
        if not tangents_match(s, leaf) or len(set(is_complex)) > 1:
            raise _does_not_fit(
                f"x{show_path(path)} is {type_of(leaf)}, the slot is {type_of(s)}",
                do="A slot is an array like `x`, such as `jnp.zeros_like(x)`. In a scan, scan "
                "over slots for the steps, or close over one slot for all steps.",
            )
        # Inside `shard_map`, the gradient of a replicated slot is the sum over the devices.
        out[i], slots[i] = vary_alike([leaf, s])
    return out, slots


def _does_not_fit(*where, do):
    return rule_error("`probe` was given a slot that does not fit.", *where, do=do)


@custom_jvp
def _probe(x, slots):
    del slots
    return x


@_probe.def_jvp(symbolic_zeros=True)
def _probe_jvp(primals, tangents):
    x, slots = primals
    t_x, t_slots = tangents
    t_slots = [
        None if is_zero_leaf(t) else t.astype(leaf.dtype)
        for t, leaf in zip(t_slots, x, strict=True)
    ]
    return _probe(x, slots), add(t_x, t_slots)


@custom_vjp
def _probe_statistics(x, slot):
    del slot
    return x


@_probe_statistics.def_fwd
def _probe_statistics_fwd(x, slot):
    return x, slot


@_probe_statistics.def_bwd(symbolic_zeros=True)
def _probe_statistics_bwd(slot, ct):
    cts = jax.tree.leaves(ct)
    is_finite = [jnp.isfinite(c) for c in cts]
    finite = [jnp.where(ok, c, 0) for ok, c in zip(is_finite, cts, strict=True)]
    zero = jnp.zeros_like(slot.max)
    largest = [jnp.max(jnp.abs(c), initial=0).astype(zero.dtype) for c in finite]
    counts = [jnp.sum(~ok).astype(zero.dtype) for ok in is_finite]
    found = (
        norm(finite),
        ft.reduce(jnp.maximum, largest, zero),
        sum(counts, zero),
        jnp.ones_like(zero),
    )
    fields = lambda s: (s.norm, s.max, s.nonfinite, s.steps)
    return ct, eqx.tree_at(fields, slot, found)


def tap_gradient(
    x: PyTree, callback: Callable[..., Any], *args: PyTree, ordered: bool = False
) -> PyTree:
    r"""Call a function on the host with the gradient: to print it, log it, or raise an error.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        seen = []

        def loss(h):
            def step(h, t):
                h = eqg.tap_gradient(2 * h, lambda g, t: seen.append((int(t), float(g))), t)
                return h, None

            return jax.lax.scan(step, h, jnp.arange(3))[0]

        jax.jit(jax.grad(loss))(1.0)
        jax.effects_barrier()
        print(seen)  # in the order of the backward pass
        ```

        ```text
        [(2, 1.0), (1, 2.0), (0, 4.0)]
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `callback`: called as `callback(gradient, *args)` in every backward pass, with concrete
        arrays. The gradient is a tree like `x`, with `None` for the leaves that have no
        gradient. The result of `callback` is ignored. If it raises, the program stops with a
        `jax.errors.JaxRuntimeError` that quotes the error.
    - `*args`: more arguments for `callback`, such as the step of a scan. They may be traced.
    - `ordered`: whether the calls are made in the order of the program. This is slower, and
        is not supported on more than one device.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    The identity, in both modes and at all orders. In forward mode, `callback` is not
    called; under `vmap`, it is called for each example. JAX does not wait for callbacks: call
    `jax.effects_barrier()` to wait for them.
    """
    check_function(callback, "callback", "tap_gradient")
    check_flags("tap_gradient", ordered=ordered)
    return on_backward(x, ft.partial(_tap, callback, ordered, args))


def _tap(callback, ordered, args, ct):
    jax.debug.callback(callback, ct, *args, ordered=ordered)
    return ct


def watch_gradient(x: PyTree, name: str, *, step: int | Int[Array, ""] | None = None) -> PyTree:
    r"""Raise an error if the gradient is not finite here, with this name and the step.

    Watch several points: the error names the first point that the backward pass reaches with
    such a gradient. So the NaN or infinity arises between that point and the next watched point
    on the way to the loss.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def loss(h):
            def step(h, t):
                h = eqg.watch_gradient(h, "h", step=t)
                return jnp.sqrt(h) - 1, None

            return jax.lax.scan(step, h, jnp.arange(2))[0]

        try:
            jax.jit(jax.grad(loss))(1.0)  # at step 1, the root of zero
        except jax.errors.JaxRuntimeError as error:
            assert "The gradient of `h` is not finite at step 1" in str(error)
        else:
            raise AssertionError
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `name`: the name of this point, for the error.
    - `step`: the index of the step, for the error. It may be traced.

    **Returns:**

    `x`, unchanged.

    **Raises:**

    `FloatingPointError` while the program runs; JAX raises a `jax.errors.JaxRuntimeError`
    that quotes it.

    **Derivative:**

    The identity, in both modes and at all orders. Forward mode is not watched. The rest of
    the backward pass waits for the check, so that no later point is named first. The host is
    called only if the gradient is not finite; under `vmap`, for every example.
    """
    dtype = dtype_of_array(step)
    is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    if step is not None and not (is_integer and np.shape(step) == ()):
        do = "Give the index of the step, which may be traced."
        raise bad_argument("watch_gradient", "step", "an integer", step, do)
    return on_backward(x, ft.partial(_watch, name, step))


def _watch(name, step, ct):
    leaves, treedef = jax.tree.flatten(ct)
    if not leaves:
        return ct
    is_bad = ft.reduce(jnp.logical_or, [jnp.any(~jnp.isfinite(c)) for c in leaves])
    places = tuple(f"{name}{show_path(path)}" for path in leaf_paths(treedef))
    leaves = jax.lax.cond(is_bad, *_branches(name, places), leaves, step)
    return jax.tree.unflatten(treedef, leaves)


@ft.lru_cache  # in an eager backward pass, JAX compiles each new function
def _branches(name, places):
    def call(leaves, step):
        # Not a debug callback: the result depends on the output of this callback, so JAX waits
        # for it. The output is -0.0, as `x + -0.0` is bitwise `x`.
        check = ft.partial(_raise_if_not_finite, name, places)
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        args = jax.lax.stop_gradient(leaves), step
        zero = jax.pure_callback(check, zero, *args, vmap_method="sequential")
        return [c + zero.astype(c.dtype) for c in leaves]

    return call, lambda leaves, step: leaves


def _raise_if_not_finite(name, places, cts, step):
    lines = []
    for place, c in zip(places, cts, strict=True):
        nan, inf = np.sum(np.isnan(c)), np.sum(np.isinf(c))
        if nan or inf:
            lines.append(f"  at {place}: {nan} NaN and {inf} infinite of {c.size} elements\n")
    if lines:  # under `vmap`, the host is called for finite gradients too
        at_step = "" if step is None else f" at step {int(step)}"
        raise FloatingPointError(
            f"The gradient of `{name}` is not finite{at_step}.\n{''.join(lines)}"
            "The backward pass reached this watched point first: look between "
            "here and the next watched point on the way to the loss."
        )
    return np.float32(-0.0)
