"""Modules: as arguments, as residuals, and with rules on their methods."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .captures import applying
from .compositions import x, ys
from .registry import both, for_each, Plain, ruled


@ft.cache
def layer_class(rules, kind):
    """Of layers whose method has a rule."""

    class Layer(eqx.Module):
        weight: Array
        name: str = eqx.field(static=True, default="layer")
        activation: object = jnp.sin  # a leaf that is no array

        def value(self, x):
            return self.activation(self.weight * x)

        __call__ = ruled(rules, kind, value)

    return Layer


def by_each_way(loss, layer, x):
    """Gradients with respect to the Module and to `x`, in every order."""
    grad = eqx.filter_grad(lambda args: loss(*args))
    outer = eqx.filter_grad(eqx.filter_jit(lambda args: loss(*args)))
    layer_in = eqx.filter_grad(loss)(layer, x)
    x_in = jax.grad(jax.jit(lambda x: loss(layer, x)))(x)
    return jax.tree.leaves(
        (eqx.filter_jit(grad)((layer, x)), outer((layer, x)), layer_in, x_in)
    )


@for_each("jvp", "vjp")
def method_in_scan(rules, kind):
    """https://github.com/patrick-kidger/equinox/issues/725"""

    def loss(layer, x):
        return jax.lax.scan(lambda x, y: (layer(x) * y, None), x, ys())[0]

    return by_each_way(loss, layer_class(rules, kind)(jnp.array(1.3)), x())


@for_each("jvp", "vjp")
def method_of_a_carried_module(rules, kind):
    """A Module that is trained inside a scan."""

    def loss(weight, x):
        def step(weight, y):
            inner = lambda weight: layer_class(rules, kind)(weight)(x) * y
            return weight - 0.1 * jax.grad(inner)(weight), None

        return jax.lax.scan(step, weight, ys())[0]

    args = (jnp.array(1.3), x())
    return jax.jit(jax.grad(loss, (0, 1)))(*args), jax.grad(jax.jit(loss), (0, 1))(*args)


@for_each("jvp", "vjp", error=r"closes over.\n.*`self.weight`")
def python_bound_method_as_argument(rules, kind):
    """Methods with double underscores are left to Python, and are not."""
    apply = applying(rules, kind)
    loss = lambda layer: apply(layer.__call__, x())
    eqx.filter_grad(loss)(layer_class(Plain, kind)(jnp.array(1.3)))


@both
def defined_inside_call(ruled):
    """The function and its rules close over `self`, which is not being differentiated."""

    class Outer(eqx.Module):
        weight: Array

        def __call__(self, x):
            return ruled(lambda x: jnp.sin(x) * self.weight)(x)

    def loss(x, layer):
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]

    layer = Outer(jnp.array(1.3))
    return (
        eqx.filter_jit(jax.grad(loss))(x(), layer),
        jax.grad(eqx.filter_jit(loss))(x(), layer),
        jax.grad(lambda x: eqx.filter_jit(loss)(x, layer))(x()),
    )
