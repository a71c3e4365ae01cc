"""Right rules of every kind, each beside the same function without one.

`PAIRS` maps a name to `(with a rule, without)`, and `ARGUMENTS` a function without a rule to
its arguments. The functions return one array or a tuple of them. Plain autodiff of the second
is the reference for the first.
"""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array

from .rules.formulas import sin_times, sin_times_cotangents, sin_times_tangent


sin_times_jvp = eqg.custom_jvp(sin_times)


@sin_times_jvp.def_jvp
def _sin_times_jvp(primals, tans):
    return sin_times_jvp(*primals), sin_times_tangent(*primals, *tans)


sin_times_none = eqg.custom_jvp(sin_times)


@sin_times_none.def_jvp(symbolic_zeros=True)
def _sin_times_none_jvp(primals, tans):
    x, y = primals
    t_x, t_y = tans
    from_x, from_y = tangents.scale(t_x, jnp.cos(x) * y), tangents.scale(t_y, jnp.sin(x))
    return sin_times_none(x, y), tangents.add(from_x, from_y)


sin_times_elementwise = eqg.elementwise(
    sin_times, lambda out, x, y: (jnp.cos(x) * y, jnp.sin(x))
)

# `fwd` calls the decorated function ...
sin_times_vjp = eqg.custom_vjp(sin_times)


@sin_times_vjp.def_fwd
def _sin_times_fwd(x, y):
    return sin_times_vjp(x, y), (x, y)


@sin_times_vjp.def_bwd
def _sin_times_bwd(residuals, ct):
    return sin_times_cotangents(*residuals, ct)


# ... or does not, and saves something else.
sin_times_inlined = eqg.custom_vjp(sin_times)


@sin_times_inlined.def_fwd
def _sin_times_inlined_fwd(x, y):
    sin, cos = jnp.sin(x), jnp.cos(x)
    return sin * y, {"sin": sin, "slope": cos * y}


@sin_times_inlined.def_bwd
def _sin_times_inlined_bwd(residuals, ct):
    return residuals["slope"] * ct, residuals["sin"] * ct


# All three rules.
sin_times_three = eqg.custom_vjp(sin_times)
sin_times_three.def_fwd(lambda x, y: (sin_times_three(x, y), (x, y)))
sin_times_three.def_bwd(_sin_times_bwd)


@sin_times_three.def_jvp
def _sin_times_three_jvp(primals, tans):
    return sin_times_three(*primals), sin_times_tangent(*primals, *tans)


# In Equinox's calling conventions.
sin_times_filter_jvp = eqg.filter_custom_jvp(sin_times)


@sin_times_filter_jvp.def_jvp
def _sin_times_filter_jvp(primals, tans):
    x, y = primals
    t_x, t_y = tans
    from_x, from_y = tangents.scale(t_x, jnp.cos(x) * y), tangents.scale(t_y, jnp.sin(x))
    return sin_times_filter_jvp(x, y), tangents.add(from_x, from_y)


@eqg.filter_custom_vjp
def _filter_vjp(xy):
    return sin_times(*xy)


@_filter_vjp.def_fwd
def _sin_times_filter_fwd(perturbed, xy):
    return _filter_vjp(xy), None


@_filter_vjp.def_bwd
def _sin_times_filter_bwd(residuals, ct, perturbed, xy):
    cts = sin_times_cotangents(*xy, ct)
    return tuple(c if flag else None for c, flag in zip(cts, perturbed, strict=True))


def sin_times_filter_vjp(x, y):
    return _filter_vjp((x, y))


@eqg.custom_gradient
def sin_times_closure(x, y):
    sin, cos = jnp.sin(x), jnp.cos(x)
    return sin * y, lambda ct: (cos * y * ct, sin * ct)


sin_times_vmap = eqg.custom_vjp(sin_times)
sin_times_vmap.def_fwd(lambda x, y: (sin_times_vmap(x, y), (x, y)))
sin_times_vmap.def_bwd(_sin_times_bwd)


@sin_times_vmap.def_vmap
def _sin_times_batched(axis_size, batched, x, y):
    shape = (axis_size, *(x.shape[1:] if batched[0] else x.shape))
    x, y = (
        a if b else jnp.broadcast_to(a, shape) for a, b in zip((x, y), batched, strict=True)
    )
    return sin_times_vmap(x, y), True


class Layer(eqx.Module):
    """A layer whose derivative is its own."""

    weight: Array
    bias: Array | None
    name: str = eqx.field(static=True, default="layer")
    activation: object = jnp.tanh  # a leaf that is not an array

    @eqg.custom_vjp
    def __call__(self, x):
        out = self.weight @ x
        return out if self.bias is None else out + self.bias

    @__call__.def_fwd
    def _fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _bwd(residuals, ct):
        self, x = residuals
        bias = None if self.bias is None else ct
        return tangents.of(self, weight=jnp.outer(ct, x), bias=bias), self.weight.T @ ct

    def plain(self, x):
        out = self.weight @ x
        return out if self.bias is None else out + self.bias


def layer(weight, bias, x):
    return jnp.tanh(Layer(weight, bias)(x))


def layer_plain(weight, bias, x):
    return jnp.tanh(Layer(weight, bias).plain(x))


# Two outputs, one of them an integer, and arguments in a tree.
def two_outputs(tree):
    x, y = tree["x"], tree["y"]
    return jnp.tanh(x) * y, jnp.sum(x**2), jnp.argmax(x)


two_outputs_jvp = eqg.custom_jvp(two_outputs)


@two_outputs_jvp.def_jvp
def _two_outputs_jvp(primals, tans):
    (tree,), (t_tree,) = primals, tans
    x, y, t_x, t_y = tree["x"], tree["y"], t_tree["x"], t_tree["y"]
    tanh = jnp.tanh(x)
    t_first = (1 - tanh**2) * y * t_x + tanh * t_y
    return two_outputs_jvp(tree), (t_first, 2 * jnp.vdot(x, t_x), None)


two_outputs_vjp = eqg.custom_vjp(two_outputs)


@two_outputs_vjp.def_fwd
def _two_outputs_fwd(tree):
    return two_outputs_vjp(tree), tree


@two_outputs_vjp.def_bwd
def _two_outputs_bwd(tree, cts):
    x, y = tree["x"], tree["y"]
    ct, ct_sum, _ = cts
    tanh = jnp.tanh(x)
    return ({"x": (1 - tanh**2) * y * ct + 2 * x * ct_sum, "y": tanh * ct},)


def _flat(fn):
    return lambda x, y: fn({"x": x, "y": y})[:2]


_KEYS = jr.split(jr.key(0), 6)
_VECTORS = (jr.normal(_KEYS[0], (3,)), jr.normal(_KEYS[1], (3,)))
_LAYER = (jr.normal(_KEYS[2], (4, 3)), jr.normal(_KEYS[3], (4,)), _VECTORS[0])
_two_outputs_plain = _flat(two_outputs)

PAIRS = {
    "jvp": (sin_times_jvp, sin_times),
    "jvp, symbolic zeros": (sin_times_none, sin_times),
    "elementwise": (sin_times_elementwise, sin_times),
    "vjp": (sin_times_vjp, sin_times),
    "vjp, inlined": (sin_times_inlined, sin_times),
    "vjp and jvp": (sin_times_three, sin_times),
    "vjp and vmap": (sin_times_vmap, sin_times),
    "filter_custom_jvp": (sin_times_filter_jvp, sin_times),
    "filter_custom_vjp": (sin_times_filter_vjp, sin_times),
    "custom_gradient": (sin_times_closure, sin_times),
    "method": (layer, layer_plain),
    "tree, jvp": (_flat(two_outputs_jvp), _two_outputs_plain),
    "tree, vjp": (_flat(two_outputs_vjp), _two_outputs_plain),
}
ARGUMENTS = {sin_times: _VECTORS, layer_plain: _LAYER, _two_outputs_plain: _VECTORS}
