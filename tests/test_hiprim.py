"""What `docs/coming-from/jax.md` says of JAX's `HiPrim`, and the same with this library.

A test fails when JAX has changed, and the page is wrong.
"""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import hijax  # noqa: TID251  what the page is about


pytestmark = pytest.mark.versions


if not hasattr(hijax, "HiPrim"):
    pytest.skip("this version of JAX has no `HiPrim`", allow_module_level=True)

X, Y = jnp.array(0.5), jnp.array(3.0)
DERIVED = {
    "lin": hijax.linearize_from_jvp[0],
    "linearized": hijax.linearize_from_jvp[1],
    "vjp_fwd": hijax.vjp_from_jvp[0],
    "vjp_bwd_retval": hijax.vjp_from_jvp[1],
}


def _init(self, *in_avals):
    self.in_avals, self.out_aval, self.params = in_avals, in_avals[-1], {}
    hijax.HiPrim.__init__(self)


def primitive(expand, jvp=None, **rules):
    """A function that binds a primitive with these rules."""
    rules = {"__init__": _init, "expand": expand, **rules}
    if jvp is not None:
        rules = {"jvp": jvp, **DERIVED, **rules}
    cls = types.new_class("Primitive", (hijax.HiPrim,), exec_body=lambda ns: ns.update(rules))
    return lambda *args: cls(*(jax.tree.map(jax.typeof, x) for x in args))(*args)


def _sin_times(self, x, y):
    return jnp.sin(x) * y


def _sin_times_jvp(self, primals, tangents):
    (x, y), (t_x, t_y) = primals, map(hijax.instantiate_zeros, tangents)
    return self(x, y), jnp.cos(x) * y * t_x + jnp.sin(x) * t_y


sin_times = primitive(_sin_times, _sin_times_jvp)


def test_both_modes():
    assert jnp.allclose(jax.grad(sin_times)(X, Y), 3 * jnp.cos(X))
    assert jnp.allclose(
        jax.jvp(sin_times, (X, Y), (X, X))[1], (3 * jnp.cos(X) + jnp.sin(X)) * X
    )


def test_needs_a_batching_rule():
    with pytest.raises(NotImplementedError, match="must implement `batch`"):
        jax.vmap(sin_times)(jnp.ones(2), jnp.ones(2))
    with pytest.raises(NotImplementedError, match="must implement `batch`"):
        jax.hessian(sin_times)(X, Y)


def test_a_reverse_rule_has_no_forward_mode():
    f = primitive(
        lambda self, x, y: x * y,
        vjp_fwd=lambda self, nonzeros, x, y: (self(x, y), (x, y)),
        vjp_bwd_retval=lambda self, res, ct: (ct * res[1], ct * res[0]),
    )
    assert jax.grad(f)(X, Y) == 3.0
    with pytest.raises(NotImplementedError, match="must implement `jvp`"):
        jax.jvp(f, (X, Y), (X, Y))


def test_a_zero_in_a_formula():
    jvp = lambda self, ps, ts: (self(*ps), jnp.cos(ps[0]) * ps[1] * ts[0] + ts[1] * ps[0])
    f = primitive(_sin_times, jvp)
    jax.jvp(f, (X, Y), (X, Y))
    with pytest.raises(TypeError, match="'Zero'"):
        jax.grad(f)(X, Y)


def closes_over(scale, x):
    expand = lambda self, x: jnp.sin(scale * x)
    return primitive(expand, lambda self, ps, ts: (self(*ps), scale * ts[0]))(x)


def test_closures():
    with pytest.raises(TypeError, match="No constant handler"):
        jax.jit(closes_over)(Y, X)
    scanned = lambda s, x: jax.lax.scan(lambda c, _: (closes_over(s, c), None), x, length=2)[0]
    with pytest.raises(TypeError, match="No constant handler"):
        jax.jit(scanned)(Y, X)
    assert jax.jit(jax.grad(closes_over))(Y, X) == 0.0  # and not x * cos(scale * x)
