"""Modules: as arguments, as residuals, and with rules on their methods."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .captures import applying
from .compositions import x, ys
from .registry import for_each, Plain, ran


class Layer(eqx.Module):
    """A layer with a reverse rule, as the documentation has it."""

    weight: Array
    name: str = eqx.field(static=True, default="layer")
    activation: object = jnp.tanh  # a leaf that is no array

    @eqg.custom_vjp
    def __call__(self, x):
        return jnp.sin(self.weight * x)

    @__call__.def_fwd
    def _fwd(self, x):
        return self(x), ran((self, x))

    @__call__.def_bwd
    def _bwd(residuals, ct):
        self, x = residuals
        slope = jnp.cos(self.weight * x) * ct
        ct_weight = jnp.sum(slope * x) if self.weight.ndim == 0 else slope * x
        return eqg.tangents.of(self, weight=ct_weight), self.weight * slope


class ForwardLayer(eqx.Module):
    """The same with a forward rule."""

    weight: Array

    @eqg.custom_jvp
    def __call__(self, x):
        return jnp.sin(self.weight * x)

    @__call__.def_jvp
    def _jvp(primals, tangents):
        (self, x), (t_self, t_x) = primals, tangents
        t_inner = t_self.weight * x + self.weight * t_x
        return self(x), ran(jnp.cos(self.weight * x) * t_inner)


class PlainLayer(eqx.Module):
    weight: Array

    def __call__(self, x):
        return jnp.sin(self.weight * x)

    def call(self, x):
        return self(x)


LAYERS = {"vjp": Layer, "jvp": ForwardLayer}


def layer_of(rules, kind, weight):
    return PlainLayer(weight) if rules is Plain else LAYERS[kind](weight)


def by_each_way(loss, layer, x):
    """Gradients with respect to the Module and to `x`, in every order."""
    grad = eqx.filter_grad(lambda args: loss(*args))
    outer = eqx.filter_grad(eqx.filter_jit(lambda args: loss(*args)))
    layer_in = eqx.filter_grad(loss)(layer, x)
    x_in = jax.grad(jax.jit(lambda x: loss(layer, x)))(x)
    return jax.tree.leaves(
        (eqx.filter_jit(grad)((layer, x)), outer((layer, x)), layer_in, x_in)
    )


@for_each(("jvp", "vjp"))
def method_in_scan(rules, kind):
    """https://github.com/patrick-kidger/equinox/issues/725"""

    def loss(layer, x):
        return jax.lax.scan(lambda x, y: (layer(x) * y, None), x, ys())[0]

    return by_each_way(loss, layer_of(rules, kind, jnp.array(1.3)), x())


@for_each(("jvp", "vjp"))
def method_of_a_carried_module(rules, kind):
    """A Module that is trained inside a scan."""

    def loss(weight, x):
        def step(weight, y):
            inner = lambda weight: layer_of(rules, kind, weight)(x) * y
            return weight - 0.1 * jax.grad(inner)(weight), None

        return jax.lax.scan(step, weight, ys())[0]

    args = (jnp.array(1.3), x())
    return jax.jit(jax.grad(loss, (0, 1)))(*args), jax.grad(jax.jit(loss), (0, 1))(*args)


@for_each(("jvp", "vjp"), error=r"closes over.\n.*`self.weight`")
def python_bound_method_as_argument(rules, kind):
    """Methods with double underscores are left to Python, and are not."""
    apply = applying(rules, kind)
    jax.grad(lambda layer: apply(layer.__call__, x()))(PlainLayer(jnp.array(1.3)))


@for_each(("jvp", "vjp"))
def defined_inside_call(rules, kind):
    """The function and its rules close over `self`, which is not being differentiated."""

    class Outer(eqx.Module):
        weight: Array

        def __call__(self, x):
            def value(x):
                return jnp.sin(x) * self.weight

            def jvp(primals, tangents):
                (x,), (t_x,) = primals, tangents
                return f(x), ran(jnp.cos(x) * self.weight * t_x)

            def fwd(x):
                return f(x), ran(x)

            def bwd(x, ct):
                return (jnp.cos(x) * self.weight * ct,)

            f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
            return f(x)

    def loss(x, layer):
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]

    layer = Outer(jnp.array(1.3))
    return (
        eqx.filter_jit(jax.grad(loss))(x(), layer),
        jax.grad(eqx.filter_jit(loss))(x(), layer),
        jax.grad(lambda x: eqx.filter_jit(loss)(x, layer))(x()),
    )
