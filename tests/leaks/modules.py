"""Modules: as arguments, as residuals, and with rules on their methods."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .captures import applying
from .compositions import x, xs, ys
from .registry import for_each, op_of, Plain, ran, shape


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
def method_as_scan_body(rules, kind):
    """Bound, so that it closes over the Module."""

    def loss(layer, x):
        step = layer.__call__
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0]

    return by_each_way(loss, layer_of(rules, kind, jnp.array(1.3)), x())


@for_each(("jvp", "vjp"))
def method_under_vmap(rules, kind):
    """One Module, many inputs."""
    loss = lambda layer, v: jnp.sum(jax.vmap(layer)(v))
    return by_each_way(loss, layer_of(rules, kind, jnp.array(1.3)), xs())


@for_each(("jvp", "vjp"))
def method_of_an_ensemble(rules, kind):
    """Many Modules, one input, in a scan."""
    make = eqx.filter_vmap(lambda weight: layer_of(rules, kind, weight))

    def loss(layers, x):
        each = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
        step = lambda x, _: (jnp.mean(each(layers, x)), None)
        return jax.lax.scan(step, x, None, length=3)[0]

    return by_each_way(loss, make(ys()), x())


@for_each(("jvp", "vjp"))
def method_of_a_nested_module(rules, kind):
    class Outer(eqx.Module):
        layers: list
        scale: Array

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.scale * x

    layers = [layer_of(rules, kind, jnp.array(w)) for w in (0.5, 1.5)]
    return by_each_way(lambda m, x: m(x), Outer(layers, jnp.array(2.0)), x())


@for_each(("jvp", "vjp"))
def method_under_checkpoint(rules, kind):
    def loss(layer, x):
        return eqx.filter_checkpoint(lambda layer, x: layer(x))(layer, x)

    return by_each_way(loss, layer_of(rules, kind, jnp.array(1.3)), x())


@for_each(("jvp", "vjp"))
def method_in_forward_mode_and_second_order(rules, kind):
    def loss(weight, x):
        return layer_of(rules, kind, weight)(x)

    pushed = jax.jit(lambda w, x: jax.jvp(loss, (w, x), (w, x)))(x(), x())
    return pushed, jax.hessian(jax.jit(loss), (0, 1))(x(), x())


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


@for_each(("jvp", "vjp"))
def module_argument_by_keyword(rules, kind):
    """Passed by keyword, a positional parameter is what it was."""
    apply = applying(rules, kind)
    loss = lambda layer, x: apply(x=x, fn=layer)
    return by_each_way(loss, PlainLayer(jnp.array(1.3)), x())


@for_each(("jvp", "vjp"))
def module_argument_in_scan(rules, kind):
    apply = applying(rules, kind)
    loss = lambda layer, x: jax.lax.scan(lambda x, y: (apply(layer, x) * y, None), x, ys())[0]
    return by_each_way(loss, PlainLayer(jnp.array(1.3)), x())


@for_each(("jvp", "vjp"))
def bound_method_as_argument(rules, kind):
    """Equinox's bound methods are trees: the Module in them has a derivative."""
    apply = applying(rules, kind)
    loss = lambda layer, x: jax.lax.scan(
        lambda x, y: (apply(layer.call, x) * y, None), x, ys()
    )[0]
    return by_each_way(loss, PlainLayer(jnp.array(1.3)), x())


@for_each(("jvp", "vjp"), error=r"closes over.\n.*`self.weight`")
def python_bound_method_as_argument(rules, kind):
    """Those with double underscores are left to Python, and are not."""
    apply = applying(rules, kind)
    jax.grad(lambda layer: apply(layer.__call__, x()))(PlainLayer(jnp.array(1.3)))


@for_each(("jvp", "vjp"))
def module_argument_of_an_ensemble(rules, kind):
    apply = applying(rules, kind)
    layers = eqx.filter_vmap(PlainLayer)(ys())
    loss = lambda layers, x: jnp.sum(eqx.filter_vmap(apply, in_axes=(0, None))(layers, x))
    return by_each_way(loss, layers, x())


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


@for_each(("jvp", "vjp"), error=r"closes over.\n.*`self.weight`")
def defined_inside_call_and_differentiated(rules, kind):
    class Outer(eqx.Module):
        weight: Array

        def __call__(self, x):
            def value(x):
                return jnp.sin(x) * self.weight

            f = (
                rules.jvp(value, lambda primals, tangents: (f(*primals), tangents[0]))
                if kind == "jvp"
                else rules.vjp(value, lambda x: (f(x), None), lambda _, ct: (ct,))
            )
            return f(x)

    layer = Outer(jnp.array(1.3))
    eqx.filter_jit(eqx.filter_grad(lambda layer, x: layer(x)))(layer, x())


@shape
def module_as_residual(rules):
    def value(weight, x):
        return PlainLayer(weight)(x)

    def fwd(weight, x):
        layer = PlainLayer(weight)
        return layer(x), ran((layer, "text", x))

    def bwd(residuals, ct):
        layer, text, x = residuals
        assert text == "text"
        slope = jnp.cos(layer.weight * x) * ct
        return slope * x, slope * layer.weight

    f = rules.vjp(value, fwd, bwd)
    loss = lambda weight, x: jax.lax.scan(lambda x, y: (f(weight, x) * y, None), x, ys())[0]
    args = (jnp.array(1.3), x())
    return jax.jit(jax.grad(loss, (0, 1)))(*args), jax.grad(jax.jit(loss), (0, 1))(*args)


@for_each(("jvp", "vjp"))
def activation_of_an_mlp(rules, kind):
    """A function with a rule is a leaf of somebody else's Module, which is carried along."""
    f = op_of(kind, rules)
    activation = lambda x: f(x, jnp.ones_like(x))
    key = jax.random.key(0)
    mlp = eqx.nn.MLP(2, 2, 4, 2, activation=activation, key=key)
    if kind == "jvp":  # its own nonlinearity, `relu`, is a `jax.custom_jvp`
        mlp = eqx.nn.Sequential([mlp, eqx.nn.MLP(2, 2, 4, 1, key=key)])

    def loss(mlp, v):
        return jnp.sum(jax.lax.scan(lambda v, _: (mlp(v), None), v, None, length=3)[0])

    return by_each_way(loss, mlp, jnp.array([0.3, -0.4]))


@shape
def class_and_static_methods(rules):
    """Rules on what is called through the class."""

    def on_class(cls, x):
        assert cls is Functions
        return 2 * jnp.sin(x)

    def on_class_jvp(primals, tangents):
        (cls, x), (_, t_x) = primals, tangents
        return cls.double(x), ran(2 * jnp.cos(x) * t_x)

    def static(x):
        return 3 * jnp.sin(x)

    def static_jvp(primals, tangents):
        return Functions.triple(*primals), ran(3 * jnp.cos(primals[0]) * tangents[0])

    class Functions(eqx.Module):
        double = rules.jvp(classmethod(on_class), on_class_jvp)
        triple = rules.jvp(staticmethod(static), static_jvp)

    loss = lambda x: Functions.double(x) + Functions().triple(x)
    return jax.jit(jax.grad(loss))(x()), jax.grad(jax.jit(loss))(x())
