"""The ways to write a rule: with JAX, with Equinox and with this library.

A forward rule is `tangent(*primals, *tangents)`, and a reverse rule `cotangents(*primals, ct)`,
with a tuple of one cotangent for each argument.
"""

import equinox as eqx
import eqx_grads as eqg
import jax


def _forward(decorated, define, fn, tangent):
    rule = lambda primals, tangents: (fn(*primals), tangent(*primals, *tangents))
    define(decorated)(rule)
    return decorated


def jax_jvp(fn, tangent):
    return _forward(jax.custom_jvp(fn), lambda f: f.defjvp, fn, tangent)


def eqx_jvp(fn, tangent):
    """Here a tangent may be `None`."""
    return _forward(eqx.filter_custom_jvp(fn), lambda f: f.def_jvp, fn, tangent)


def eqg_jvp(fn, tangent):
    return _forward(eqg.custom_jvp(fn), lambda f: f.def_jvp, fn, tangent)


def jax_vjp(fn, cotangents, fwd=None):
    """With `fwd`, `cotangents` is the backward rule itself, `bwd(residuals, ct)`."""
    f = jax.custom_vjp(fn)
    if fwd is None:
        f.defvjp(lambda *args: (fn(*args), args), lambda args, ct: cotangents(*args, ct))
    else:
        f.defvjp(fwd, cotangents)
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
