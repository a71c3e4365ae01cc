"""Functions and rules that hold a value: the ways to hold one, and who does."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp


def x():
    return jnp.array(0.7)


def many():
    return jnp.linspace(0.5, 1.5, 3)


# ------------------------------------------------------------------ ways to hold a value
# Each makes a function of the rest of the arguments out of `fn(a, *args)`.


def closure(fn, a):
    def held(*args):
        return fn(a, *args)

    return held


def default_argument(fn, a):
    def held(*args, a=a):
        return fn(a, *args)

    return held


def partial(fn, a):
    return ft.partial(fn, a)


class Holder(eqx.Module):
    a: jax.Array
    fn: object

    def method(self, *args):
        return self.fn(self.a, *args)

    def __call__(self, *args):
        return self.fn(self.a, *args)


def bound_method(fn, a):
    return Holder(a, fn).method


def nested_function(fn, a):
    def inner():
        return a

    def middle():
        return inner()

    def held(*args):
        return fn(middle(), *args)

    return held


def jitted_inner_function(fn, a):
    @jax.jit
    def inner(b):
        return a + 0 * b

    def held(*args):
        return fn(inner(1.0), *args)

    return held


def raw_custom_jvp(fn, a):
    @jax.custom_jvp
    def inner(b):
        return a * b

    inner.defjvp(lambda primals, tangents: (inner(*primals), a * tangents[0]))

    def held(*args):
        return fn(inner(1.0), *args)

    return held


def containers(fn, a):
    kept = {"list": [(a, "text")]}

    def held(*args):
        return fn(kept["list"][0][0], *args)

    return held


FIVE = (closure, default_argument, partial, bound_method, nested_function)
OTHERS = (jitted_inner_function, raw_custom_jvp, containers)


# ------------------------------------------------------------------ who holds it
# The function is `sin(x) * a`, and gets `a` as an argument too. Whoever holds the value uses
# that; all others use the argument. `hold` is one of the ways above.


def from_argument(fn, a):
    """Not held: `a` is the last of the primals, arguments or residuals."""
    del a
    return lambda *args: fn(last(args[0] if type(args[0]) is tuple else args), *args)


def last(args):
    return args[-1]


def value(a, x, _):
    return jnp.sin(x) * a


def value_jvp(a, primals, tangents):
    (x, _), (t_x, t_a) = primals, tangents
    return jnp.sin(x) * a, jnp.cos(x) * a * t_x + jnp.sin(x) * t_a


def value_fwd(a, x, b):
    return jnp.sin(x) * a, (x, b)


def value_bwd(a, residuals, ct):
    x, _ = residuals
    return jnp.cos(x) * a * ct, jnp.sin(x) * ct


def jvp_op(hold, a, holders):
    pick = lambda name: hold if name in holders else from_argument
    f = eqg.custom_jvp(pick("function")(value, a))
    f.def_jvp(pick("rule")(value_jvp, a))
    return f


def vjp_op(hold, a, holders):
    pick = lambda name: hold if name in holders else from_argument
    f = eqg.custom_vjp(pick("function")(value, a))
    f.def_fwd(pick("fwd")(value_fwd, a))
    f.def_bwd(pick("bwd")(value_bwd, a))
    return f


HOLDERS = {
    "jvp, function": (jvp_op, {"function"}),
    "jvp, rule": (jvp_op, {"rule"}),
    "jvp, both": (jvp_op, {"function", "rule"}),
    "vjp, function": (vjp_op, {"function"}),
    "vjp, fwd": (vjp_op, {"fwd"}),
    "vjp, bwd": (vjp_op, {"bwd"}),
    "vjp, all": (vjp_op, {"function", "fwd", "bwd"}),
}
