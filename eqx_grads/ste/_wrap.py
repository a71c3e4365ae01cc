"""`wrap`: the value of any function, with a straight-through derivative."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._errors import name_of, place_of, rule_error, show_path, show_tree
from .._errors.trees import filter_jvp
from .._rules.custom_jvp import custom_jvp
from .._rules.elementwise import elementwise
from .._rules.wrapper import set_metadata
from .._tangent_spaces import is_differentiable, tangents_match


Backward = str | Callable[..., Any]


def wrap(
    fn: Callable[..., Any] | None = None, *, backward: Backward = "identity"
) -> Callable[..., Any]:
    r"""The value of a function, with a straight-through derivative.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.ste.wrap
        def to_grid(x, step=0.25):
            return jnp.round(x / step) * step

        print(to_grid(0.3))
        print(jax.grad(to_grid)(0.3))

        step = eqg.ste.wrap(lambda x: jnp.heaviside(x, 0.0), backward=jax.nn.sigmoid)
        print(jax.grad(step)(0.0))
        ```

        ```text
        0.25
        1.0
        0.25
        ```

    **Arguments:**

    - `fn`: gives the value. It is never differentiated. A function, or a Module.
    - `backward`: the function whose derivative is used. It is called with the first argument
        of `fn`, and returns the same structure and shapes as `fn`. Or one of these names,
        for a function that acts elementwise:

        - `"identity"`: the derivative is one (Bengio et al. 2013).
        - `"hard_tanh"`: one where $|x| \le 1$, zero elsewhere (Courbariaux et al. 2016; Larq's
            `ste_sign`).
        - `"approx_sign"`: $2 - 2|x|$ where $|x| \le 1$, zero elsewhere (Liu et al. 2018,
            Bi-Real Net).
        - `"swish_sign"`: $\beta\,(2 - \beta x \tanh(\beta x / 2)) / (1 + \cosh \beta x)$ with
            $\beta = 5$ (Darabi et al. 2018, BNN+).

    Without `fn`, `wrap` is a decorator.

    **Returns:**

    A function of the same arguments: a Module that holds both. As a decorator, use it on
    functions, not on methods.

    **Derivative:**

    That of `backward`, with respect to the first argument and to the parameters of
    `backward`: $\dot y = \partial b(x)\,\dot x$, cast to the dtype of the value. To
    differentiate with respect to anything else is an error. At the kinks, $|x| = 1$, the
    derivative of `"hard_tanh"` is one, so that a weight that was clipped to one can return.
    Both modes; higher orders differentiate the derivative of `backward`.

    **Raises:**

    [`eqx_grads.RuleError`][] if `fn` is not callable, if `backward` is unknown, if its
    output has another structure or shape than that of `fn`, or if another argument or a
    parameter of `fn` is differentiated.

    `backward="hard_tanh"` is not the same as `backward=lambda x: jnp.clip(x, -1, 1)`, whose
    derivative at the ends is one half.
    """
    if isinstance(backward, str) and backward in _NAMED:
        backward = _NAMED[backward]
    if not callable(backward):
        raise rule_error(
            "`ste.wrap` got an unknown `backward`.",
            f"it is {backward!r:.80}",
            do="Give it a function, or one of " + ", ".join(f'"{b}"' for b in _NAMED) + ".",
        )
    if fn is None:
        return ft.partial(wrap, backward=backward)
    if not callable(fn):
        raise rule_error(
            "`ste.wrap` was given something that is not a function.",
            f"`fn` is {fn!r:.80}",
            do="Give it the function whose value is used, and call the result: "
            "`ste.wrap(jnp.round)(x)`.",
        )
    wrapped = _StraightThrough(fn, backward)
    set_metadata(wrapped, fn)
    return wrapped


class _StraightThrough(eqx.Module):
    fn: Callable[..., Any]
    backward: Callable[..., Any]

    def __call__(self, x, /, *args, **kwargs):
        return straight_through(x, self.fn, self.backward, args, kwargs)

    @property
    def __wrapped__(self):
        return self.fn


@custom_jvp
def straight_through(x, fn, backward, args, kwargs):
    del backward
    return fn(x, *args, **kwargs)


@straight_through.def_jvp(symbolic_zeros=True)
def _straight_through_jvp(primals, tangents):
    x, fn, backward, *_ = primals
    t_x, t_fn, t_backward, t_args, t_kwargs = tangents
    _check_unperturbed(fn, {"fn": t_fn, "args": t_args, "kwargs": t_kwargs})
    out = straight_through(*primals)
    surrogate, t_surrogate = filter_jvp(_call, (backward, x), (t_backward, t_x))
    _check_tangents_match(fn, backward, out, surrogate)
    return out, jax.tree.map(_cast, out, t_surrogate, is_leaf=lambda x: x is None)


def _call(backward, x):
    return backward(x)


def _cast(y, t):
    if not is_differentiable(y) or t is None:
        return None
    return (t if jnp.iscomplexobj(y) else jnp.real(t)).astype(y.dtype)


def _check_unperturbed(fn, tangents):
    leaves = jax.tree_util.tree_leaves_with_path(tangents)
    if leaves:
        raise rule_error(
            f"`{name_of(fn)}` is straight-through, and was differentiated with respect to "
            "something other than its first argument.",
            *(f"at {path[0].key}{show_path(path[1:])}" for path, _ in leaves),
            place_of(fn),
            do="The straight-through derivative is that of the first argument only. Pass "
            "`jax.lax.stop_gradient` of the others, or write all derivatives with "
            "`eqx_grads.custom_jvp`.",
        )


def _check_tangents_match(fn, backward, out, surrogate):
    leaves, treedef = jax.tree.flatten(out)
    surrogates, surrogate_def = jax.tree.flatten(surrogate)
    if treedef == surrogate_def and all(map(tangents_match, leaves, surrogates)):
        return
    what = "the argument" if backward is _identity else f"the value of `{name_of(backward)}`"
    raise rule_error(
        f"`{name_of(fn)}` is straight-through, and the tangents of its `backward` do not fit "
        "its value.",
        f"the value is {show_tree(out)}",
        f"{what} is {show_tree(surrogate)}",
        place_of(fn),
        do="Both need the same structure and shapes, and be floating in the same places.",
    )


def _on_leaves(fn, x):
    return jax.tree.map(lambda leaf: fn(leaf) if is_differentiable(leaf) else leaf, x)


def _identity(x):
    return x


def _hard_tanh(x):
    return _on_leaves(_hard_tanh_of_leaf, x)


def _hard_tanh_of_leaf(x):
    # Not `jnp.clip`, whose derivative at the bounds is one half. With the `stop_gradient`,
    # the residual is one bool per element.
    constant = jax.lax.stop_gradient(x)
    return jax.lax.select(jnp.abs(constant) <= 1, x, jnp.sign(constant))


def _approx_sign(x):
    return _on_leaves(_approx_sign_of_leaf, x)


def _approx_sign_derivative(out, x):
    del out
    return jnp.where(jnp.abs(x) <= 1, 2 - 2 * x * jnp.sign(x), 0)


@elementwise(derivative=_approx_sign_derivative)
def _approx_sign_of_leaf(x):
    x = jnp.clip(x, -1, 1)
    return x * (2 - jnp.abs(x))


def _swish_sign(x):
    return _on_leaves(_swish_sign_of_leaf, x)


_BETA = 5


def _swish_sign_derivative(out, x):
    del out
    u = _BETA * jnp.clip(x, -1e3, 1e3)  # outside, the derivative is zero in every precision
    small = jnp.exp(-u * jnp.sign(u))
    return _BETA * (2 - u * jnp.tanh(u / 2)) * 2 * small / (1 + small) ** 2


@elementwise(derivative=_swish_sign_derivative)
def _swish_sign_of_leaf(x):
    u = _BETA * jnp.clip(x, -1e3, 1e3)
    return 2 * jax.nn.sigmoid(u) * (1 + u * jax.nn.sigmoid(-u)) - 1


_NAMED = {
    "identity": _identity,
    "hard_tanh": _hard_tanh,
    "approx_sign": _approx_sign,
    "swish_sign": _swish_sign,
}
