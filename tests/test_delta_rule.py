"""The gated delta rule and the selective scan against a plain scan of their equations, step by
step, in float64; and single steps of layers."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .guard.registry.loops import selective
from .helpers import assert_close, quick_only, temp_bytes


pytestmark = pytest.mark.versions


def plain(q, k, v, beta, decay, state, delta=True, reverse=False):
    """One head: `S = exp(g) S`, then `S = S + beta k (v - S^T k)^T`, as flash-linear-attention
    publishes the recurrence."""

    def step(s, x):
        q, k, v, beta, g = x
        s = jnp.exp(g) * s
        s = s + beta * jnp.outer(k, v - k @ s if delta else v)
        return s, q @ s

    last, out = jax.lax.scan(step, state, (q, k, v, beta, decay), reverse=reverse)
    return out, last


def ours(*args, **options):
    *args, state = args
    return eqg.gated_delta_rule(*args, state=state, **options)


DECAYS = {
    "near one": lambda n: -1e-3 * n**2,
    "usual": lambda n: -0.3 * n**2,
    "near zero": lambda n: -30.0 - n,
    "both": lambda n: np.where(n > 0, -40.0, -1e-3),
    "none": lambda n: 0 * n,
}


def inputs(steps, *, heads=(), key=4, value=3, decay="usual", beta="any", repeated=False):
    rng = np.random.default_rng(steps)
    normal = lambda *shape: rng.normal(size=(steps, *heads, *shape))
    q, k, v = normal(key), normal(key), normal(value)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    if repeated:
        k[1::2] = k[:1]
    betas = {"any": 1 / (1 + np.exp(-normal())), "zero": np.zeros((steps, *heads))}
    betas["one"] = np.ones((steps, *heads))
    betas["both"] = np.round(betas["any"])
    g = DECAYS[decay](normal())
    return [*map(jnp.asarray, (q, k, v, betas[beta], g, rng.normal(size=(*heads, key, value))))]


def derivatives(fn, args, seed=0):
    """The outputs, and the cotangents of all arguments."""
    out, pull = jax.vjp(fn, *args)
    cts = [jr.normal(jr.key(seed + i), x.shape, x.dtype) for i, x in enumerate(out)]
    return out, pull(tuple(cts))


def assert_same(fn, reference, args, tolerance=1e-10):
    """To the tolerance of the largest entry of each array."""
    got, want = (jax.jit(ft.partial(derivatives, f))(args) for f in (fn, reference))
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        bound = tolerance * max(1e-30, float(jnp.max(jnp.abs(y))))
        assert float(jnp.max(jnp.abs(x - y))) <= bound, (x, y)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "decay", quick_only(DECAYS, ("both", "near one"), pytest.mark.thorough)
)
def test_decays(decay):
    """And steps that fill the chunks, and that do not; an odd chunk, and one of one step."""
    for steps in (1, 31, 64, 100):
        args = inputs(steps, decay=decay, beta="both" if decay == "both" else "any")
        assert_same(ours, plain, args)


@pytest.mark.thorough
@pytest.mark.parametrize("delta", [True, False])
def test_betas_and_repeated_keys(delta):
    for beta in ("zero", "one"):
        args = inputs(70, beta=beta, repeated=True, decay="near one")
        assert_same(ft.partial(ours, delta=delta), ft.partial(plain, delta=delta), args)


def test_a_reset():
    """A decay of minus infinity clears the state."""
    *args, decay, state = inputs(40)
    decay = decay.at[17].set(-jnp.inf)
    assert_same(ours, plain, [*args, decay, state])


def test_a_reset_is_as_a_large_decay():
    *args, decay, state = inputs(3)
    run = lambda d: eqg.gated_delta_rule(*args, decay.at[1].set(d), state=state)
    assert_close(run(-jnp.inf), run(-200.0))


@pytest.mark.parametrize("reverse", [False, True])
def test_lengths(reverse):
    """Padding may hold anything, and counts for nothing."""
    args, lengths = inputs(50, heads=(3, 2)), [50, 7, 0]
    fn = lambda *args: ours(*args, lengths=lengths, reverse=reverse)
    bad = [x.at[20:, 1].set(jnp.nan) for x in args[:5]]
    got, cts = derivatives(fn, [*bad, args[5]])
    over_heads = jax.vmap(ft.partial(plain, reverse=reverse), (1, 1, 1, 1, 1, 0), (1, 0))
    for i, n in enumerate(lengths):
        want = over_heads(*(x[:n, i] for x in args[:5]), args[5][i])
        assert_close((got[0][:n, i], got[1][i]), want)
        assert not any(jnp.any(x[n:, i]) for x in (got[0], *cts[:5]))


def test_infinite_cotangents_of_padding():
    """As of a loss that divides by an output: no gradient passes."""
    x, step, a, b, c, state = selective_inputs(2)
    options, ones = {"lengths": [9, 4], "reverse": True}, jnp.ones((9, 2))
    bad = lambda x: x.at[4:, 1].set(jnp.nan)
    rule = lambda *args: ours(*args, chunk=1, **options)
    scan = lambda *args: eqg.selective_scan(*args[:5], state=args[5], **options)

    @ft.partial(jax.jit, static_argnums=0)
    def pulled(fn, *args):
        (out, last), pull = jax.vjp(fn, *args)
        return pull((jnp.ones_like(out).at[4:, 1].set(jnp.inf), last))

    of_rule = pulled(rule, x, step, b, ones, bad(-ones), state)
    for ct in (*of_rule, *pulled(scan, bad(x), step, a, b, c, state)):
        assert jnp.isfinite(ct).all()


def test_dtypes_of_outputs():
    half, n, one = jnp.ones((3, 2), "bfloat16"), jnp.ones((3, 2), int), jnp.ones(3)
    out, state = jax.eval_shape(eqg.gated_delta_rule, half, half, half, one, one)
    y, _ = jax.eval_shape(eqg.selective_scan, n, n, jnp.ones((2, 2), complex), n, n)
    assert [x.dtype for x in (out, state, y)] == ["bfloat16", "float64", "float64"]


def test_memory_grows_with_the_number_of_chunks():
    """Reverse mode keeps one state per chunk, where the plain scan keeps one per step."""
    shapes = [(1024, 64), (1024, 64), (1024, 64), (1024,), (1024,), (64, 64)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def temporary(fn):
        return temp_bytes(jax.grad(lambda *args: jnp.sum(fn(*args)[0] ** 2), range(5)), *args)

    assert temporary(ours) < 0.2 * temporary(plain)


def test_errors():
    x = jnp.ones((3, 2))
    with pytest.raises(eqg.RuleError, match=r"`beta` is float64\[\]\n`q` and"):
        eqg.gated_delta_rule(x, x, x[0], 1.0)
    with pytest.raises(eqg.RuleError, match="of `selective_scan` do"):
        eqg.selective_scan(x, x, x[:1], x, x)


@pytest.mark.thorough
def test_no_numbers_and_no_steps():
    for shape in ((5, 0, 2), (5, 1, 0)):
        x = jnp.ones(shape)
        out, pull = jax.vjp(lambda x: eqg.gated_delta_rule(x, x, x, 1.0, chunk=2), x)
        assert [y.shape for y in out] == [shape, (shape[1], shape[2], shape[2])]
        assert pull(out)[0].shape == shape
    out, last = eqg.gated_delta_rule(*(jnp.ones((0, n)) for n in (2, 2, 3)), 1.0)
    assert out.shape == (0, 3)
    assert not jnp.any(last)


def selective_inputs(batch):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    a, b, c = -np.exp(normal(3, 4)), normal(9, batch, 4), normal(9, batch, 4)
    state = normal(batch, 3, 4)
    args = normal(9, batch, 3), np.exp(normal(9, batch, 3)), a, b, c, state
    return [*map(jnp.asarray, args)]


@pytest.mark.parametrize("method", ["scan", "associative"])
def test_a_complex_selective_scan(method):
    x, step, a, b, c, state = selective_inputs(1)
    a, state = jax.lax.complex(a, 2 * a**2), jax.lax.complex(state[0], 0 * state[0])
    run = lambda *args: eqg.selective_scan(*args[:5], state=args[5], method=method)

    def plain(*args):
        with jax.numpy_dtype_promotion("standard"):
            return selective(*args, reverse=False)

    assert_same(run, plain, (x[:, 0], step[:, 0], a, b[:, 0], c[:, 0], state))


# ---------------------------------------------------------------- layers

LAYERS = {
    "GatedDeltaNet": lambda **options: eqg.nn.GatedDeltaNet(
        3, 4, heads=2, key_size=4, value_size=3, key=jr.key(0), **options
    ),
    "SelectiveSSM": lambda **options: eqg.nn.SelectiveSSM(3, 4, 6, key=jr.key(0), **options),
}


@pytest.mark.parametrize(
    ("name", "time_major"), [("GatedDeltaNet", False), ("SelectiveSSM", True)]
)
def test_single_steps(name, time_major):
    """Step by step from a state, as in generation, the numbers are the same."""
    layer = LAYERS[name](num_layers=2, time_major=time_major, dtype=jnp.float64)
    xs = jr.normal(jr.key(1), (9, 2, 3))
    in_layout = (lambda x: x) if time_major else (lambda x: jnp.swapaxes(x, 0, 1))
    step, call = eqx.filter_jit(layer.step), eqx.filter_jit(lambda xs: layer(xs))
    ys, last = call(in_layout(xs))
    _, state = call(in_layout(xs[:5]))
    for t in range(5, 9):
        y, state = step(xs[t], state)
        assert_close(y, in_layout(ys)[t], tolerance=1e-12)
    assert_close(state, last, tolerance=1e-12)
    one, _ = step(xs[0, 0])
    assert_close(one, in_layout(ys)[0, 0], tolerance=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["GatedDeltaNet", "SelectiveSSM"])
def test_empty_sequences(name):
    layer = LAYERS[name](bidirectional=True)
    ys, state = layer(jnp.ones((0, 3)))
    assert ys.shape == (0, 8)
    assert jax.vmap(layer)(jnp.ones((2, 0, 3)))[0].shape == (2, 0, 8)
    assert_close(state, layer(jnp.ones((2, 3)), lengths=0)[1])
