"""Identities with a derivative of their own, beyond what the guard compares with NumPy: they
cost nothing, pass on other leaves, round and draw as others do. And probes of a gradient."""

import contextlib
import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from eqx_grads import GradientStatistics
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close, quick_only


pytestmark = pytest.mark.x64

X = np.array([0.5, -1.0, 2.0, 0.1], np.float32)
OPS = {
    "scale": lambda x: eqg.scale_gradient(x, 0.5),
    "reverse": lambda x: eqg.reverse_gradient(x, 2.0),
    "mask": lambda x: eqg.mask_gradient(x, True),
    "clip": lambda x: eqg.clip_gradient(x, -0.2, 0.1),
    "clip norm": lambda x: eqg.clip_gradient_norm(x, 0.3),
    "normalize": eqg.normalize_gradient,
    "zero nonfinite": eqg.zero_nonfinite_gradient,
    "cast": lambda x: eqg.cast_gradient(x, jnp.bfloat16),
    "on_backward": lambda x: eqg.on_backward(x, ft.partial(jax.tree.map, lambda g: 2 * g)),
    "noise": lambda x: eqg.noise_gradient(x, key=jr.key(0), stddev=0.1),
    "probe": lambda x: eqg.probe(x, GradientStatistics()),
    "tap": lambda x: eqg.tap_gradient(x, lambda *_: None),
    "watch": lambda x: eqg.watch_gradient(x, "x"),
}


@pytest.mark.cost
@pytest.mark.parametrize("name", OPS)
def test_adds_nothing_to_the_compiled_program(name):
    """Instruction for instruction, it is the program without the op."""

    def instructions(op):
        scan = lambda x: jax.lax.scan(lambda h, _: (jnp.sin(op(h)), None), x, None, 3)[0]
        compiled = jax.jit(scan).lower(jnp.asarray(X)).compile()
        lines = compiled.as_text().splitlines()
        kinds = sorted(line.split("(")[0].split()[-1] for line in lines if " = " in line)
        return [k.rsplit(".", 1)[0] for k in kinds], compiled.cost_analysis()["flops"]

    assert instructions(OPS[name]) == instructions(lambda x: x)


def test_all_other_leaves_pass():
    tree = {
        "x": jnp.asarray(X),
        "count": jnp.array(3),
        "flag": True,
        "number": 7,
        "nothing": None,
    }
    tree |= {"name": "layer", "fn": jnp.tanh, "key": jr.key(0), "empty": jnp.zeros((0, 2))}
    for name, op in OPS.items():
        out = op(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree), name
        for key in ("flag", "number", "name", "fn"):
            assert out[key] is tree[key]
        assert out["count"].dtype == jnp.array(3).dtype
    sine = lambda op: lambda t: jnp.sum(jnp.sin(op(t)["x"]))
    every = eqx.filter_jit(lambda t: [eqx.filter_grad(sine(op))(t) for op in OPS.values()])
    for grads in every(tree):
        assert np.all(np.isfinite(grads["x"]))
        assert grads["name"] is grads["count"] is grads["nothing"] is None


def gradient_of(op, ct):
    """What `op` makes of this cotangent."""
    return jax.vjp(op, jax.tree.map(jnp.zeros_like, ct))[1](ct)[0]


FORMATS = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz"]
QUICK = ("float16", "float8_e4m3fn")


@pytest.mark.parametrize("name", quick_only(FORMATS, QUICK, pytest.mark.thorough))
def test_casts_as_ml_dtypes(name):
    """Every exponent, subnormal numbers, halfway cases and overflow; also compiled, where XLA
    would drop a pair of casts."""
    rng, finfo = np.random.default_rng(0), ml_dtypes.finfo(name)
    values = rng.uniform(-2, 2, 4000) * 2.0 ** rng.integers(-30, 20, 4000)
    edge = float(finfo.smallest_normal) * np.linspace(-2, 2, 65)
    top = float(finfo.max) * np.array([0.99, 1.0, 1.02, 1.04, 1.1])
    top = top[np.abs(top) < 3e38]
    cts = np.concatenate([values, edge, top, -top, [0.0, np.inf, np.nan]])
    cast = lambda ct: gradient_of(lambda x: eqg.cast_gradient(x, name), ct)
    run = jax.jit(cast)
    for f, dtype in ((run, "float32"), (cast, "float16"), (run, "float16"), (run, "bfloat16")):
        with np.errstate(all="ignore"):
            want = (ct := cts.astype(dtype)).astype(name).astype(dtype).astype(float)
        np.testing.assert_array_equal(np.asarray(f(jnp.asarray(ct)), float), want)
    assert jax.jit(jax.hessian(lambda x: eqg.cast_gradient(x, name) ** 3))(1.0) == 6.0


def test_on_backward_of_what_holds_anything():
    """A Module, and what is being differentiated: the value does not depend on it."""

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, g):
            return self.factor * g

    def loss(x, scale):
        by_closure = eqg.on_backward(x, lambda g: x * g)
        return eqg.on_backward(by_closure, scale) ** 2

    scale = Scale(jnp.array(5.0))
    g_x, g_scale = jax.jit(jax.grad(loss, (0, 1)))(3.0, scale)
    assert (g_x, g_scale.factor) == (3 * 5 * 6, 0)
    assert jax.grad(lambda scale: jax.grad(loss)(3.0, scale))(scale).factor == 18.0
    # A tree is handed over whole, with zeros where nothing depends on it.
    seen, swap = [], lambda g: (seen.append(g), {"a": g["b"], "b": g["a"], "n": None})[1]
    f = lambda x: 2.0 * eqg.on_backward(x, swap)["a"]
    grads = jax.grad(f, allow_int=True)({"a": 1.0, "b": 5.0, "n": 3})
    assert (grads["a"], grads["b"], seen[0]["b"], seen[0]["n"]) == (0.0, 2.0, 0.0, None)


# ---------------------------------------------------------------- probe

N, STEPS = 3, 5
WEIGHT = jnp.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4], [1.1, 0.1, 0.6]])
SLOTS = jnp.zeros((STEPS, N), WEIGHT.dtype)


def recurrent(see, slots):
    """A loss of a recurrent network, in which `see(h, slot)` is called at every step."""

    def body(h, slot):
        h = see(jnp.tanh(WEIGHT @ h + 1), slot)
        return h, jnp.sum(h**2)

    return jnp.sum(jax.lax.scan(body, jnp.zeros(N, WEIGHT.dtype), slots)[1])


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_one_gradient_for_each_step(around):
    """Against plain autodiff with respect to a term added to each activation."""
    plain, probed = (around(ft.partial(recurrent, see)) for see in (jnp.add, eqg.probe))
    value, grads = jax.value_and_grad(probed)(SLOTS + jnp.nan)  # their values do not matter
    assert_close((value, grads), jax.value_and_grad(plain)(SLOTS))
    assert_close(jax.hessian(probed)(SLOTS), jax.hessian(plain)(SLOTS))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shared", ["x", "slot", "neither"])
def test_probe_in_a_shard_map(shared, check_vma):
    """A slot that the devices share holds the sum over them."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    specs = tuple(Spec() if shared == name else Spec("i") for name in ("x", "slot", "w"))
    x, slots, weights = jnp.arange(4.0), jnp.zeros(4), jnp.array([1.0, 2.0, 3.0, 4.0])
    x, slots = x[:1] if shared == "x" else x, slots[:1] if shared == "slot" else slots
    f = lambda x, slot, w: jnp.sin(eqg.probe(x, slot)) * w
    f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=Spec("i"), check_vma=check_vma)
    grads = jax.jit(jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1)))(x, slots, weights)
    plain = lambda x, slots, w: jnp.sum(jnp.sin(x + slots) * w)
    assert_close(grads, jax.grad(plain, (0, 1))(x, slots, weights))


# ---------------------------------------------------------------- tap and watch


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
@pytest.mark.parametrize("ordered", [False, True])
def test_tap_in_a_scan(ordered, around):
    seen = []
    log = lambda g, t: seen.append((int(t), float(g)))
    step = lambda h, t: (eqg.tap_gradient(2 * h, log, t, ordered=ordered), None)
    loss = around(lambda h: jax.lax.scan(step, h, jnp.arange(3))[0])
    assert jax.jit(jax.grad(loss))(1.0) == 8.0
    jax.effects_barrier()
    assert seen == [(2, 1.0), (1, 2.0), (0, 4.0)]

    def stop(gradient):
        raise ValueError(f"a gradient of {gradient}")

    f = lambda x: eqg.tap_gradient(x, stop, ordered=ordered) ** 2
    with pytest.raises(Exception, match=r"a gradient of 6\.0"):
        jax.block_until_ready(jax.jit(jax.grad(f))(3.0))
    with contextlib.suppress(Exception):  # which JAX keeps for whoever waits for it
        jax.effects_barrier()


def test_taps_of_trees():
    seen = []

    @jax.jit
    @jax.grad
    def gradient(x):
        tap = lambda g, n: seen.append((int(n), g["a"].tolist(), g["n"]))
        x = eqg.tap_gradient({"a": x, "n": 3}, tap, jnp.asarray(7), ordered=True)["a"]
        x = eqg.tap_gradient(2 * x, lambda g: seen.append(g.tolist()), ordered=True)
        return jnp.sum(jnp.asarray([1.5, -1]) * x)

    gradient(jnp.ones(2))
    jax.effects_barrier()
    assert seen == [[1.5, -1], (7, [3, -2], None)]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 2.0])
def test_watch_counts_what_is_not_finite(bad):
    def loss(x, y):
        x = eqg.watch_gradient(x, "early")
        x = eqg.watch_gradient({"a": 2 * x, "b": y}, "late", step=jnp.asarray(4))
        return jnp.sum(jnp.asarray([1, bad]) * x["a"]) + jnp.sum(x["b"])

    gradient = jax.jit(jax.grad(loss))
    if bad == 2:
        assert gradient(jnp.ones(2), jnp.ones(1)).tolist() == [2, 4]
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="`late`") as error:
        jax.block_until_ready(gradient(jnp.ones(2), jnp.ones(1)))
    counts = "1 NaN and 0 infinite" if np.isnan(bad) else "0 NaN and 1 infinite"
    assert "The gradient of `late` is not finite at step 4." in str(error.value)
    assert f"at late['a']: {counts} of 2 elements" in str(error.value)
    assert "late['b']" not in str(error.value)


def roots(h):
    """At step 1, the root of zero."""

    def body(h, t):
        h = eqg.watch_gradient({"h": h}, "h", step=t)["h"]
        return jnp.sqrt(h) - 1, None

    return jax.lax.scan(body, h, jnp.arange(2))[0]


WATCHED = {
    "jit": jax.jit(jax.grad(roots)),
    "checkpoint": jax.grad(jax.checkpoint(roots)),
    "vmap(grad)": lambda h: jax.jit(jax.vmap(jax.grad(roots)))(jnp.array([4.0, h, 9.0])),
    "grad(vmap)": lambda h: jax.grad(lambda hs: jnp.sum(jax.vmap(roots)(hs)))(
        jnp.array([4, h])
    ),
}


@pytest.mark.parametrize("name", WATCHED)
def test_watch_names_the_point_the_leaf_and_the_step(name):
    message = (
        r"The gradient of `h` is not finite at step 1.\n"
        r"  at h\['h'\]: 0 NaN and 1 infinite of 1 elements\n"
    )
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(WATCHED[name](1.0))
