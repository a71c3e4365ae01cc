"""Nothing is left behind by tracing, and what was compiled is used again."""

import collections
import gc
import types

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array

from .leaks.modules import ForwardLayer, Layer
from .leaks.registry import op_of, WithRules


def batched_op():
    """With a batching rule, and so with another primitive."""
    f = op_of("vjp", WithRules)

    @f.def_vmap
    def _batched(axis_size, batched, x, y):
        return jax.vmap(lambda x, y: jnp.sin(x) * y, [0 if b else None for b in batched])(
            x, y
        ), True

    return f


def gradient_op():
    @eqg.custom_gradient
    def f(x, y):
        return jnp.sin(x) * y, lambda ct: (jnp.cos(x) * y * ct, jnp.sin(x) * ct)

    return f


def elementwise_op():
    return eqg.elementwise(
        lambda x, y: jnp.sin(x) * y, lambda out, x, y: (jnp.cos(x) * y, jnp.sin(x))
    )


def capturing_op():
    """That closes over an array, which would be kept with it."""
    scale = jnp.ones(100)
    f = eqg.custom_vjp(lambda x, y: jnp.sin(x) * y * scale[0])
    f.def_fwd(lambda x, y: (f(x, y), (x, y)))
    f.def_bwd(lambda r, ct: (jnp.cos(r[0]) * r[1] * ct, jnp.sin(r[0]) * ct * scale[0]))
    return f


OPS = {
    "jvp": lambda: op_of("jvp", WithRules),
    "vjp": lambda: op_of("vjp", WithRules),
    "vmap": batched_op,
    "gradient": gradient_op,
    "elementwise": elementwise_op,
    "capturing": capturing_op,
}


def program(f, tracer=None):
    """A gradient of a scan, new to JAX each time."""

    def loss(x, a):
        def step(x, y):
            return f(x, y) if tracer is None else f(x, y + tracer(a)), None

        return jax.lax.scan(step, x, jnp.ones(3))[0]

    return jax.jit(jax.grad(loss))


KINDS = (jax.core.Tracer, Jaxpr, ClosedJaxpr, jax.Array, types.FunctionType, Array)


def census():
    """How many there are of what could be left behind."""
    gc.collect()
    count = collections.Counter()
    for obj in gc.get_objects():
        for kind in (jax.core.Tracer, Jaxpr, ClosedJaxpr, jax.Array, types.FunctionType):
            if isinstance(obj, kind):
                count[kind.__name__] += 1
        if type(obj).__module__.startswith("eqx_grads"):
            count[type(obj).__qualname__] += 1
    return count
