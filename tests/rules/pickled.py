"""Objects to pickle: one of each kind, and how it looks in another process.

`python -m tests.rules.pickled FILE` reads a file that another process has written.
"""

import functools as ft
import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from . import layers


# ------------------------------------------------------------------ functions with rules


@eqg.custom_jvp
def forward(x):
    return jnp.sin(x)


@forward.def_jvp
def _forward_jvp(primals, tangents):
    return forward(*primals), 7 * tangents[0]


@eqg.custom_vjp
def reverse(x):
    return jnp.sin(x)


@reverse.def_fwd
def _reverse_fwd(x):
    return reverse(x), None


@reverse.def_bwd
def _reverse_bwd(residuals, ct):
    return (5 * ct,)


@reverse.def_vmap
def _reverse_vmap(size, batched, x):
    return reverse(x), batched[0]


@eqg.custom_gradient
def by_gradient(x):
    return jnp.sin(x), _threefold


def _threefold(ct):
    return 3 * ct


@eqg.elementwise(lambda out, x: 2 * jnp.ones_like(x))
def elementwise(x):
    return jnp.sin(x)


@eqg.host_function(out=lambda x: x)
def on_host(x):
    return np.sin(x)


@on_host.def_fwd(keep=2)
def _on_host_fwd(x):
    return np.sin(x), np.cos(x)


@on_host.def_bwd
def _on_host_bwd(cos, ct):
    return (cos * ct,)


@eqg.implicit(lambda y, x: y**3 - x)
def root(x):
    return jnp.cbrt(x)


class Layer(eqx.Module):
    """With a method that has a rule, and a bound method and functions with rules in fields."""

    weight: jax.Array
    activation: Callable[..., Any] = forward

    @eqg.custom_vjp
    def apply(self, x):
        return jnp.sum(self.weight) * x

    @apply.def_fwd
    def _apply_fwd(self, x):
        return self.apply(x), (self, x)

    @apply.def_bwd
    def _apply_bwd(residuals, ct):
        self, _ = residuals
        return eqg.tangents.of(self, weight=jnp.full(3, 11 * ct, ct.dtype)), 13 * ct

    def __call__(self, x):
        return self.activation(self.apply(x))


def layer():
    return Layer(jnp.array([1.0, 2.0, 3.0], jnp.float32))


FUNCTIONS = {
    "forward": lambda: forward,
    "reverse": lambda: reverse,
    "by_gradient": lambda: by_gradient,
    "elementwise": lambda: elementwise,
    "on_host": lambda: on_host,
    "root": lambda: root,
    "a layer": layer,
    "a bound method": lambda: layer().apply,
    "a method": lambda: jax.tree_util.Partial(Layer.apply, layer()),
    "a layer that was rebuilt": lambda: jax.tree.map(lambda x: x, layer()),
    "a rule in a layer that was rebuilt": lambda: jax.tree.map(lambda x: x, reverse),
    "a function on the host in a tree": lambda: jax.tree.map(lambda x: x, on_host),
    "gradient op": lambda: jax.tree_util.Partial(eqg.scale_gradient, s=3.0),
    "checkpoint": lambda: eqg.filter_checkpoint(reverse),
}


# ------------------------------------------------------------------ layers


def _report():
    rules = {eqx.nn.Linear: (nn.FakeQuantize(4), None)}
    return nn.quantize_model(eqx.nn.Linear(3, 2, key=jr.key(0)), rules)[1]


LAYERS = {
    **{name: ft.partial(make, jr.key(0)) for name, (make, _) in layers.LAYERS.items()},
    "GRU with dropout": lambda: nn.GRU(3, 2, dropout=0.5, num_layers=2, key=jr.key(0)),
    "LIFState": lambda: nn.LIFState(*jnp.ones((2, 2), jnp.float32)),
    "QuantizationReport": _report,
}


# ------------------------------------------------------------------ reports and errors


def _model():
    return Layer(jnp.zeros(3, jnp.float32))


def _error():
    f = eqg.custom_jvp(lambda x: x)
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.ones(2)))
    try:
        jax.grad(f)(1.0)
    except eqg.RuleError as error:
        return error
    raise AssertionError


REPORTS = {
    "NaNReport": lambda: eqg.explain_nan(
        lambda m: jnp.sum(jnp.where(m.weight > 0, jnp.sqrt(m.weight), 0.0)), _model()
    ),
    "ZeroReport": lambda: eqg.explain_zero(lambda m: jnp.sum(jnp.round(m.weight)), _model()),
    "MemoryReport": lambda: eqg.explain_memory(lambda m: jnp.sum(jnp.sin(m.weight)), _model()),
    "GradientReport": lambda: eqgt.check_gradients(lambda m: jnp.sum(m.weight), _model()),
    "Report": lambda: eqgt.check_rule(forward, 0.3, checks=("primal",), raises=False),
    "GradientStatistics": lambda: eqg.GradientStatistics(3),
    "RuleError": _error,
}

OBJECTS = {**FUNCTIONS, **LAYERS, **REPORTS}


# ------------------------------------------------------------------ what can be seen


def seen(name: str, x: Any) -> Any:
    """Numbers and texts, which are the same in another process."""
    if name in REPORTS and name != "GradientStatistics":
        return str(x)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(x) if eqx.is_array_like(leaf)]
    return leaves, _derivative(name, x)


def _derivative(name, x):
    if name in FUNCTIONS:
        value, gradient = jax.value_and_grad(x)(jnp.float32(0.3))
        return np.asarray(value), np.asarray(gradient)
    if name in layers.LAYERS:
        model, call = eqx.nn.inference_mode(x), layers.LAYERS[name][1]
        shape = layers.TIME, layers.IN
        xs = np.linspace(-1, 1, shape[0] * shape[1], dtype=np.float32).reshape(shape)
        return np.asarray(
            jax.grad(lambda xs: jnp.sum(jnp.real(call(model, xs))))(jnp.asarray(xs))
        )
    return None


def write(names, module=pickle) -> bytes:
    made = {name: OBJECTS[name]() for name in names}
    records = {name: (module.dumps(x), seen(name, x)) for name, x in made.items()}
    return pickle.dumps(records)


def read(data: bytes) -> dict[str, str]:
    """Which objects are not what they were, and how."""
    wrong = {}
    for name, (pickled, expected) in pickle.loads(data).items():
        try:
            got = seen(name, pickle.loads(pickled))
            same = jax.tree.map(lambda a, b: np.shape(a) == np.shape(b), got, expected)
            if isinstance(got, str):
                assert got == expected, got
            else:
                assert all(jax.tree.leaves(same))
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                    got,
                    expected,
                )
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong


if __name__ == "__main__":
    # The module's own name, as that is where its functions are found.
    from tests.rules import pickled

    wrong = pickled.read(pathlib.Path(sys.argv[1]).read_bytes())
    for name, error in wrong.items():
        print(f"{name}: {error}")
    sys.exit(bool(wrong))
