"""Linear recurrences, whose backward pass is the same recurrence in the other direction."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._errors import check_flags, rule_error, type_of
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.symbolic_sizes import is_symbolic
from .._rules.custom_vjp import custom_vjp
from .._rules.explicit_sharding import distribute_like, explicit_spec, is_explicit
from .._tangent_spaces import holds_numbers
from .chunked_scan import shift_in


METHODS = ("auto", "scan", "associative")


def linear_recurrence(
    a: ArrayLike,
    b: ArrayLike,
    h0: ArrayLike | None = None,
    *,
    reverse: bool = False,
    method: str = "auto",
) -> Array:
    r"""The states of the recurrence $h_t = a_t\,h_{t-1} + b_t$, for every step $t$.

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
    - `method`: `"scan"` is one step after another; `"associative"` is a parallel prefix in
        $O(\log T)$ steps, which does about twice the work and needs several times the
        memory. They agree to rounding. `"auto"` is `"scan"` if JAX's default backend is a CPU,
        and `"associative"` otherwise. A symbolic number of steps (see `jax.export`) is
        always run by `"scan"`.

    **Returns:**

    The states without the initial one, `(time, ...)`, in the common dtype of the arguments.

    **Derivative:**

    With $\dot h_0$ given, $\dot h_t = a_t\,\dot h_{t-1} + (\dot a_t\,h_{t-1} + \dot b_t)$ going
    forward. In reverse $g_t = \bar h_t + a_{t+1}\,g_{t+1}$, and then $\bar b_t = g_t$,
    $\bar a_t = g_t\,h_{t-1}$ and $\bar h_0 = a_1\,g_1$. The residuals are `a` and the states.
    Both are linear recurrences, run by the same `method`, so that both modes and all orders
    cost as much as the function.

    **Raises:**

    [`eqx_grads.RuleError`][] if the shapes do not broadcast, there is no time axis, or the
    method is unknown.
    """
    check_flags("linear_recurrence", reverse=reverse)
    if not isinstance(method, str) or method not in METHODS:
        raise rule_error(
            "`linear_recurrence` has no such method.",
            f"`method` is {method!r:.60}",
            do='Choose one of "auto", "scan" and "associative".',
        )
    if method == "auto":
        method = "scan" if jax.default_backend() == "cpu" else "associative"
    a, b, h0 = _fit(a, b, h0)
    if b.shape[0] == 0:
        return b
    if b.shape[0] == 1:
        return a * h0[None] + b  # no loop, so that a step of a scan is seen to be elementwise
    # JAX has no parallel prefix over a symbolic size.
    associative = method == "associative" and not is_symbolic(b.shape[0])
    return _recurrence(a, b, h0, kind=_Kind(reverse, associative))


def _fit(a, b, h0):
    """The arguments in one dtype, `a` with a time axis of full length or of length one."""
    for argument, x in (("a", a), ("b", b), ("h0", h0)):
        if not (holds_numbers(x) or (x is None and argument == "h0")):
            raise rule_error(
                f"The `{argument}` of `linear_recurrence` is not an array of numbers.",
                f"it is {type_of(x)}",
                do="Give an array, `jnp.stack(xs)` for a list.",
            )
    a, b = jnp.asarray(a), jnp.asarray(b)
    h0 = None if h0 is None else jnp.asarray(h0)
    given = [x for x in (a, b, h0) if x is not None]
    # Explicit, as strict promotion refuses to find a common dtype.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*given)
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.result_type(dtype, jnp.float32)
    shape = _common_shape(a.shape, b.shape)
    if not shape or (h0 is not None and _common_shape(h0.shape, shape[1:]) != shape[1:]):
        raise rule_error(
            "The arguments of `linear_recurrence` do not fit together.",
            f"`a` is {type_of(a)}, `b` is {type_of(b)}, `h0` is {type_of(h0)}",
            do="`a` and `b` broadcast together to the shape `(time, ...)`, and `h0` broadcasts "
            "to `(...)`.",
        )
    a = a.astype(dtype)
    a_steps = a.shape[0] if a.ndim == len(shape) else 1
    a = _broadcast(a, (a_steps, *shape[1:]))
    b = _broadcast(b.astype(dtype), shape)
    h0 = jnp.zeros(shape[1:], dtype) if h0 is None else h0.astype(dtype)
    return _sharded_alike(a, b, _broadcast(h0, shape[1:]))


def _common_shape(*shapes):
    try:
        return jnp.broadcast_shapes(*shapes)
    except ValueError:
        return None


def _broadcast(x, shape):
    return jnp.broadcast_to(x.reshape((1,) * (len(shape) - x.ndim) + x.shape), shape)


def _sharded_alike(a, b, h0):
    """Over explicit mesh axes: steps and state, sharded as the product of `a` and `b` is."""
    if not (is_explicit(a) or is_explicit(b)):
        return a, b, h0
    product = a[:1] * b[:1]
    of_step = explicit_spec(product)[1:]
    a, b = (distribute_like(x, product, (*explicit_spec(x)[:1], *of_step)) for x in (a, b))
    return a, b, distribute_like(h0, product, of_step)


# The recurrence and its adjoint are one function of `(a, b, s)`:
#
#     out_t = a_t s_t + b_t,  s_{t+1} = out_t          (the recurrence)
#     out_t = s_t + b_t,      s_{t+1} = a_t out_t      (`delayed`: its adjoint)
#
# In the adjoint, a factor acts on the state that leaves its step, not on the one that enters.
# The adjoint of either is the other one, in the other direction.
class _Kind(NamedTuple):
    reverse: bool
    associative: bool
    delayed: bool = False

    @property
    def adjoint(self):
        return _Kind(not self.reverse, self.associative, not self.delayed)

    @property
    def first(self):
        return -1 if self.reverse else 0


@custom_vjp
def _recurrence(a, b, s, *, kind):
    return _run(a, b, s, kind)


@compile_eager_calls
def _run(a, b, s, kind):
    if kind.associative:
        return _associative(a, b, s, kind)
    constant = a.shape[0] != b.shape[0]

    def step(s, x):
        a_t, b_t = (a[0], x) if constant else x
        if kind.delayed:
            out = b_t + s
            return a_t * out, out
        out = a_t * s + b_t
        return out, out

    return jax.lax.scan(step, s, b if constant else (a, b), reverse=kind.reverse)[1]


@_recurrence.def_fwd
def _recurrence_fwd(a, b, s, *, kind):
    out = _recurrence(a, b, s, kind=kind)
    return out, (a, s, out)


@_recurrence.def_bwd
def _recurrence_bwd(residuals, ct, *, kind):
    a, s, out = residuals
    zero, first = jnp.zeros_like(s), kind.first
    g = _recurrence(a, ct, zero, kind=kind.adjoint)
    if kind.delayed:
        # s_{t+1} = a_t out_t, so that ct_a_t = g_{t+1} out_t.
        ct_a = shift_in(g, zero, reverse=not kind.reverse) * out
        return _unbroadcast_time(ct_a, a), g, g[first]
    ct_a = g * shift_in(out, s, reverse=kind.reverse)
    return _unbroadcast_time(ct_a, a), g, a[first] * g[first]


@_recurrence.def_jvp
def _recurrence_jvp(primals, tangents, *, kind):
    a, b, s = primals
    t_a, t_b, t_s = tangents
    out = _recurrence(a, b, s, kind=kind)
    if kind.delayed:
        t_from_a = shift_in(t_a * out, jnp.zeros_like(s), reverse=kind.reverse)
    else:
        t_from_a = t_a * shift_in(out, s, reverse=kind.reverse)
    return out, _recurrence(a, t_from_a + t_b, t_s, kind=kind)


def _unbroadcast_time(ct_a, a):
    """Summed over time, for a factor that is the same at all times."""
    return ct_a if a.shape[0] == ct_a.shape[0] else jnp.sum(ct_a, 0, keepdims=True)


def _associative(a, b, s, kind):
    a = jnp.broadcast_to(a, b.shape)
    if kind.delayed:
        a = shift_in(a, jnp.ones_like(a[0]), reverse=kind.reverse)
    b = b.at[kind.first].add(s if kind.delayed else a[kind.first] * s)
    return jax.lax.associative_scan(_compose, (a, b), reverse=kind.reverse)[1]


def _compose(earlier, later):
    a, b = earlier
    a_next, b_next = later
    return a_next * a, a_next * b + b_next
