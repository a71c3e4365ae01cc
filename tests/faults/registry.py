"""What a planted fault is, and the few words in which one is written.

A fault is a function of one bool, `bug`: with `True` it makes a rule that is wrong in exactly
one way, with `False` the same rule without the fault, its right twin.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np


Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Fault(NamedTuple):
    """A rule that is wrong in one way.

    `make()` and `right()` return `(fn, args, options)` for `check_rule(fn, *args, **options)`,
    made afresh each time, so that nothing is remembered. The check named `check` must fail,
    with a text that `match` is found in.
    """

    make: Callable[[], Case]
    check: str
    match: str
    right: Callable[[], Case]


FAULTS: dict[str, Fault] = {}


def fault(check: str, match: str) -> Callable[[Callable[[bool], Any]], Any]:
    """Enter the decorated `build(bug) -> (fn, args)` or `(fn, args, options)`."""

    def enter(build):
        name = build.__name__
        assert name not in FAULTS, name
        FAULTS[name] = Fault(
            ft.partial(_case, build, True), check, match, ft.partial(_case, build, False)
        )
        return build

    return enter


def _case(build, bug) -> Case:
    fn, args, *options = build(bug)
    return fn, args, options[0] if options else {}


def sample(*shape: int, low: float = -1.5, high: float = 1.5, seed: int = 0) -> jax.Array:
    """Numbers spread evenly over an interval, in no order: the same in every run."""
    steps = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    return jnp.asarray(low + (high - low) * ((0.6180339887 * steps + 0.37 * seed) % 1))


def complex_sample(*shape: int) -> jax.Array:
    return jax.lax.complex(sample(*shape), sample(*shape, seed=1))


# How a rule is written here. A forward rule is `tangent(*primals, *tangents)`, and a reverse
# rule `cotangents(*primals, ct)`, with a tuple of one cotangent for each argument.


def _forward(decorated, define, fn, tangent, value):
    rule = lambda primals, tangents: ((value or fn)(*primals), tangent(*primals, *tangents))
    define(decorated)(rule)
    return decorated


def jax_jvp(fn, tangent, value=None):
    return _forward(jax.custom_jvp(fn), lambda f: f.defjvp, fn, tangent, value)


def eqx_jvp(fn, tangent, value=None):
    """Here a tangent may be `None`."""
    return _forward(eqx.filter_custom_jvp(fn), lambda f: f.def_jvp, fn, tangent, value)


def eqg_jvp(fn, tangent, value=None):
    return _forward(eqg.custom_jvp(fn), lambda f: f.def_jvp, fn, tangent, value)


def jax_vjp(fn, cotangents, fwd=None):
    """With `fwd`, `cotangents` is the backward rule itself, `bwd(residuals, ct)`."""
    f = jax.custom_vjp(fn)
    if fwd is None:
        f.defvjp(lambda *args: (fn(*args), args), lambda args, ct: cotangents(*args, ct))
    else:
        f.defvjp(fwd, cotangents)
    return f


def eqx_vjp(fn, cotangent, fwd=None):
    """Of one argument, which may be a tree: `cotangent(arg, ct)`."""
    f = eqx.filter_custom_vjp(fn)
    f.def_fwd(lambda perturbed, arg: ((fwd or fn)(arg), None))
    f.def_bwd(lambda residuals, ct, perturbed, arg: cotangent(arg, ct))
    return f


def eqg_vjp(fn, cotangents, fwd=None):
    """As `jax_vjp`."""
    f = eqg.custom_vjp(fn)
    if fwd is None:
        f.def_fwd(lambda *args: (fn(*args), args))
        f.def_bwd(lambda args, ct: cotangents(*args, ct))
    else:
        f.def_fwd(fwd)
        f.def_bwd(cotangents)
    return f


# Some functions to write rules for.


def multiply(x, y):
    return x * y


def matvec(w, x):
    return w @ x


def square(x):
    return x**2
