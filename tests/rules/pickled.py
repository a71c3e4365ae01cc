"""Objects to pickle, and how they look in another process.

`python -m tests.rules.pickled FILE` reads a file that another process has written.
"""

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
from eqx_grads import surrogates


@eqg.custom_jvp
def forward(x):
    return jnp.sin(x)


forward.def_jvp(lambda p, t: (forward(*p), 7 * t[0]))


@eqg.custom_vjp
def reverse(x):
    return jnp.sin(x)


reverse.def_fwd(lambda x: (reverse(x), None))
reverse.def_bwd(lambda residuals, ct: (5 * ct,))
reverse.def_vmap(lambda size, batched, x: (reverse(x), batched[0]))


@eqg.elementwise(lambda out, x: 2 * jnp.ones_like(x))
def elementwise(x):
    return jnp.sin(x)


@eqg.host_function(out=lambda x: x)
def on_host(x):
    return np.sin(x)


on_host.def_fwd(keep=2)(lambda x: (np.sin(x), np.cos(x)))
on_host.def_bwd(lambda cos, ct: (cos * ct,))


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


rebuilt = lambda x: jax.tree.map(lambda x: x, x)
FUNCTIONS = {
    "forward": lambda: forward,
    "reverse": lambda: reverse,
    "elementwise": lambda: elementwise,
    "on_host": lambda: on_host,
    "root": lambda: root,
    "a bound method": lambda: layer().apply,
    "a layer that was rebuilt": lambda: rebuilt(layer()),
    "a rule that was rebuilt": lambda: rebuilt(reverse),
    "a function on the host that was rebuilt": lambda: rebuilt(on_host),
    "gradient op": lambda: jax.tree_util.Partial(eqg.scale_gradient, s=3.0),
    "checkpoint": lambda: eqg.filter_checkpoint(reverse),
}
OPTIONS = {"key": jr.key(0), "dtype": jnp.float32}
LAYERS = {
    "FakeQuantize": lambda: nn.FakeQuantize(4, scale=0.2, learn_scale=True),
    "FixedPoint": lambda: nn.FixedPoint(eqx.nn.GRUCell(3, 2, **OPTIONS), 2),
    "GRU": lambda: nn.GRU(3, 2, dropout=0.5, num_layers=2, **OPTIONS),
    "LIF": lambda: nn.LIF(3, 2, 0.9, surrogate=surrogates.atan(), **OPTIONS),
    "LRU": lambda: nn.LRU(3, 2, 2, bidirectional=True, **OPTIONS),
    "Quantized": lambda: nn.Quantized(eqx.nn.Linear(3, 2, **OPTIONS), nn.LSQ(4, scale=0.2)),
    "QuantizationReport": lambda: nn.quantize_model(
        eqx.nn.Linear(3, 2, **OPTIONS), {eqx.nn.Linear: (nn.FakeQuantize(4), None)}
    )[1],
    "VectorQuantizer": lambda: nn.VectorQuantizer(4, 3, **OPTIONS),
}


def _error():
    f = eqg.custom_jvp(lambda x: x)
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.ones(2)))
    try:
        jax.grad(f)(1.0)
    except eqg.RuleError as error:
        return error
    raise AssertionError


_dead = lambda m: jnp.sum(jnp.where(m.weight > 9, jnp.sqrt(m.weight - 3), 0.0))
REPORTS = {
    "NaNReport": lambda: eqg.explain_nan(_dead, layer()),
    "ZeroReport": lambda: eqg.explain_zero(lambda m: jnp.sum(jnp.round(m.weight)), layer()),
    "MemoryReport": lambda: eqg.explain_memory(lambda m: jnp.sum(jnp.sin(m.weight)), layer()),
    "GradientReport": lambda: eqgt.check_gradients(lambda m: jnp.sum(m.weight), layer()),
    "Report": lambda: eqgt.check_rule(forward, 0.3, checks=("primal",), raises=False),
    "RuleError": _error,
}
OBJECTS = {**FUNCTIONS, **LAYERS, **REPORTS}


def seen(name: str, x: Any) -> Any:
    """Numbers and texts, which are the same in another process."""
    if name in REPORTS:
        return str(x)
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(x) if eqx.is_array_like(leaf)]
    if name in FUNCTIONS:
        arrays += map(np.asarray, jax.value_and_grad(x)(jnp.float32(0.3)))
    return [x.astype(complex).round(4).tolist() for x in arrays]


def write() -> bytes:
    made = {name: make() for name, make in OBJECTS.items()}
    return pickle.dumps({name: (pickle.dumps(x), seen(name, x)) for name, x in made.items()})


def read(data: bytes) -> dict[str, Any]:
    """Which objects are not what they were, and what they are."""
    records = pickle.loads(data).items()
    got = {name: (seen(name, pickle.loads(pickled)), want) for name, (pickled, want) in records}
    return {name: pair for name, pair in got.items() if pair[0] != pair[1]}


if __name__ == "__main__":
    # The module's own name, as that is where its functions are found.
    from tests.rules import pickled

    sys.exit(pickled.read(pathlib.Path(sys.argv[1]).read_bytes()) or 0)
