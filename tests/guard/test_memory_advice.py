"""The advice of `explain_memory`: on loops, on layers and on a `vmap`.

The sizes are counted by hand from the shapes in the loss.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax


def explain(loss, *args):
    return eqg.explain_memory(loss, *args, compiled=False)


# ---------------------------------------------------------------- loops and layers


class Layer(eqx.Module):
    """`n` sines of a product with a matrix of so many units."""

    weight: jax.Array
    n: int = eqx.field(static=True, default=2)

    def __call__(self, x):
        for _ in range(self.n):
            x = jnp.sin(self.weight @ x)
        return x


def repeated(layer, x, n=8):
    return lax.scan(lambda x, _: (layer(x), None), x, None, length=n)[0]


def nested(m, x):
    return lax.scan(lambda x, _: (repeated(m["a"], x, 4) * 2, None), x, None, length=6)[0]


W16, X16 = jnp.asarray(np.eye(16)), jnp.asarray(np.ones((16, 40)))
ROW = 16 * 40 * 4  # the bytes of one array
OF_A, EACH = "Wrap `['a']` in", "each call of"
# A loss, a model, the arrays that are kept, and words of each advice: of several calls the
# numbers add up. A single call has to be computed again as a whole when the peak is reached.
LAYERS = {
    "once": (lambda m, x: m["a"](x), {"a": Layer(W16, 6)}, 11, []),
    "twice": (lambda m, x: m["a"](m["a"](x)), {"a": Layer(W16, 6)}, 23, [OF_A]),
    "two layers": (lambda m, x: m[0](m[1](x)), [Layer(W16, 6)] * 2, 23, [EACH]),
    "loop": (lambda m, x: repeated(m["a"], x, 16), {"a": Layer(W16)}, 64, [OF_A,
        "checkpoint=2)`"]),
    "two loops": (lambda m, x: repeated(m["a"], repeated(m["a"], x)), {"a": Layer(W16)}, 64,
        [OF_A, "called 2 times, by `eqg.filter_scan(..., checkpoint=2)`"]),
    "loop that keeps nothing": (lambda m, x: (lambda y: y * jnp.sin(y))(lax.scan(lambda c, x:
        (c, 2 * x), None, m["a"](x))[1]), {"a": Layer(W16)}, 6, []),
    "an output that the derivative uses": (lambda m, x: m["v"] * lax.map(jnp.exp, m["v"] * x),
        {"v": X16}, 1, []),
    "nested": (nested, {"a": Layer(W16)}, 96, [OF_A, "checkpoint=1)`", "checkpoint=2)`"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_advice_on_layers_that_are_called_several_times(name):
    loss, model, n_kept, expected = LAYERS[name]
    report = explain(lambda m, x: jnp.sum(loss(m, x)), model, X16)
    assert report.total == n_kept * ROW == sum(report.by_path().values())
    cures = sorted(a.cure for a in report.advice)
    assert len(cures) == len(expected)
    for words in expected:
        assert any(words in cure for cure in cures)
    for advice in report.advice:
        assert 0.1 * report.total < advice.saves < report.total


@pytest.mark.parametrize("n", [15, 16, 64])
def test_advice_on_a_vmap(n):
    """A chunk of about the square root is computed twice, and no other is kept."""
    vmap = lambda f: eqx.filter_vmap(f) if n == 16 else jax.vmap(f)
    layer = Layer(jnp.eye(8), 12)
    report = explain(lambda m, x: jnp.sum(vmap(m)(x)), layer, jnp.ones((n, 8)))
    found = [a for a in report.advice if a.kind == "map"]
    assert len(found) == (n >= 16)
    for advice in found:
        chunk = int(np.sqrt(n))
        assert f"`eqg.filter_map(f, xs, chunk={chunk})`" in advice.cure
        # One chunk at a time is computed again.
        assert report.total - advice.saves == chunk / n * report.total


def test_no_advice_on_a_vmap_in_a_layer_of_equinox():
    """An MLP maps over the units of its activation."""
    mlp = eqx.nn.MLP(8, 8, 64, 2, jnp.sin, key=jax.random.key(0))
    assert not explain(lambda m, x: jnp.sum(m(x)), mlp, jnp.ones(8)).advice
