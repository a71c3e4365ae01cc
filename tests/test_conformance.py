"""Every public op: `check_rule`, compilations of eager calls, `shard_map`.

`tests/guard` has the contract.
"""

import functools as ft

import equinox as eqx
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._jaxprs.varying import vary_over
from eqx_grads.testing._subject import FlatFunction
from jax.sharding import AxisType, PartitionSpec as Spec

from .cases import CASES
from .helpers import compilations, quick_only


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_check_rule(name):
    case = CASES[name]
    fn, args = case.make()
    eqgt.check_rule(fn, *args, **case.options)


# ---------------------------------------------------------------- compiled once

QUICK = ("linear_recurrence", "losses.chunked", "nn.GRU")
# JAX itself compiles each operation of an eager `jax.shard_map`; and what is never a gradient.
# The branches, and the step that calls the rule, are made in each call.
LEFT_OUT = ("psum_gradient", "nondifferentiable", "filter_cond", "custom_jvp")


def total(out):
    arrays = jax.tree.leaves(eqx.filter(out, eqx.is_inexact_array))
    return sum(jnp.sum(jnp.real(x)) for x in arrays)


def call_and_differentiate(fn, args, i):
    """At other arrays in each call."""
    new = lambda x: x * (1 + 1e-6 * i) if eqx.is_inexact_array(x) else x
    fn, args = jax.tree.map(new, (fn, args))
    fn(*args)
    eqx.filter_grad(lambda fn_and_args: total(fn_and_args[0](*fn_and_args[1])))((fn, args))


NAMES = quick_only([n for n in CASES if n not in LEFT_OUT], QUICK, pytest.mark.slow)


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_compiled_once(name):
    fn, args = CASES[name].make()
    for i in range(3):
        call_and_differentiate(fn, args, i)
    with compilations() as found:
        for i in range(3, 5):
            call_and_differentiate(fn, args, i)
    assert not found


# ---------------------------------------------------------------- inside `shard_map`
# One argument varies over the mesh, the others are replicated. The witness: the same calls, one
# after another.

N = 2
MESH = jax.make_mesh((N,), ("i",), axis_types=(AxisType.Auto,))
OWN_MESH = ("psum_gradient",)


def _normals(seed, xs):
    keys = jr.split(jr.key(seed), len(xs))
    return [jr.normal(key, x.shape, x.dtype) for key, x in zip(keys, xs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("which", [-1, 0], ids=["the last varies", "the first varies"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in OWN_MESH])
def test_op_inside_shard_map(name, which):
    case = CASES[name]
    fn, args = case.make()
    subject = FlatFunction(fn, args, {}, case.options.get("nondifferentiable", ()))
    f, leaves = subject.arrays, subject.leaves
    varies = [i == which % len(leaves) for i in range(len(leaves))]
    pick = lambda xs, get: [get(x) if v else x for x, v in zip(xs, varies, strict=True)]
    xs = pick(leaves, lambda x: jnp.stack([x, 0.97 * x]))
    ts = _normals(1, xs)
    like = jax.eval_shape(f, *leaves)
    ws = [
        jnp.stack(pair) for pair in zip(*(_normals(2 + d, like) for d in range(N)), strict=True)
    ]
    shard_map = ft.partial(jax.shard_map, mesh=MESH)
    specs = [Spec("i") if v else Spec() for v in varies]

    def derive(f, xs, ts, ws):
        return jax.jvp(f, xs, ts), list(jax.vjp(f, *xs)[1](ws))

    @jax.jit
    def one_after_another(xs, ts, ws):
        at = lambda d: (pick(xs, lambda x: x[d]), pick(ts, lambda x: x[d]), [w[d] for w in ws])
        outs, cts = zip(*(derive(f, *at(d)) for d in range(N)), strict=True)
        pairs = zip(zip(*cts, strict=True), varies, strict=True)
        summed = [jnp.stack(pair) if v else sum(pair) for pair, v in pairs]
        return jax.tree.map(lambda *x: jnp.stack(x), *outs), summed

    @jax.jit
    def outside(xs, ts, ws):
        """The derivatives of the whole."""
        of_one = lambda *xs: [x[None] for x in f(*pick(xs, lambda x: x[0]))]
        whole = shard_map(of_one, in_specs=tuple(specs), out_specs=Spec("i"))
        return derive(whole, xs, ts, ws)

    @jax.jit
    def inside(xs, ts, ws):
        """The derivatives of what one device computes."""

        def of_one(xs, ts, ws):
            all_vary = lambda *xs: [vary_over(x, frozenset({"i"})) for x in f(*xs)]
            first = lambda xs: pick(xs, lambda x: x[0])
            outs, cts = derive(all_vary, first(xs), first(ts), [w[0] for w in ws])
            return jax.tree.map(lambda x: x[None], outs), pick(cts, lambda x: x[None])

        return shard_map(
            of_one, in_specs=(specs, specs, Spec("i")), out_specs=(Spec("i"), specs)
        )(xs, ts, ws)

    expected = one_after_another(xs, ts, ws)
    for run in (outside, inside):
        eqgt.assert_trees_close(run(xs, ts, ws), expected, tolerance=2e-4, scale=1.0)
