"""Every public op: `check_rule`, `jax.debug_nans`, compilations of eager calls, `shard_map`.

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
from .helpers import compilations


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


# ---------------------------------------------------------------- NaN on the way
# With `jax.debug_nans` and `jax.disable_jit` together, JAX looks at every operation.


# One raises when it is differentiated, one differentiates a branch that makes a NaN, and the
# solver of one makes some where its guess is bad.
NOT_HERE = ("nondifferentiable", "zero_safe", "implicit")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_HERE])
def test_no_op_makes_a_nan(name):
    fn, args = CASES[name].make()
    with jax.debug_nans(True), jax.disable_jit():
        out, pull_back = eqx.filter_vjp(fn, *args)
        ones = lambda x: jnp.ones_like(x) if eqx.is_inexact_array(x) else None
        pull_back(jax.tree.map(ones, out))


# ---------------------------------------------------------------- compiled once

QUICK = (
    "linear_recurrence",
    "filter_scan",
    "filter_checkpoint",
    "losses.chunked",
    "nn.GRU",
    "nn.Recurrent",
    "nn.LIF",
)
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


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
        if name not in LEFT_OUT
    ],
)
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

N_DEVICES = 2
MESH = jax.make_mesh((N_DEVICES,), ("i",), axis_types=(AxisType.Auto,))
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

    @jax.jit
    def one_after_another(xs, ts):
        outs, cts = [], []
        for d in range(N_DEVICES):
            at, along = pick(xs, lambda x, d=d: x[d]), pick(ts, lambda x, d=d: x[d])
            outs.append(jax.jvp(f, at, along))
            cts.append(jax.vjp(f, *at)[1](_cotangents(d, outs[-1][0])))
        summed = [
            jnp.stack(pair) if v else sum(pair)
            for pair, v in zip(zip(*cts, strict=True), varies, strict=True)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *outs), summed

    expected = one_after_another(xs, ts)
    specs = [Spec("i") if v else Spec() for v in varies]
    shard_map = ft.partial(jax.shard_map, mesh=MESH)

    def per_device(*xs):
        return [x[None] for x in f(*pick(xs, lambda x: x[0]))]

    def outside(xs, ts):
        """The derivatives of the whole."""
        whole = shard_map(per_device, in_specs=tuple(specs), out_specs=Spec("i"))
        out, t_out = jax.jvp(whole, xs, ts)
        local = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in out]
        cts = zip(*(_cotangents(d, local) for d in range(N_DEVICES)), strict=True)
        return (out, t_out), list(jax.vjp(whole, *xs)[1]([jnp.stack(pair) for pair in cts]))

    def inside(xs, ts):
        """The derivatives of what one device computes."""

        def derive(xs, ts):
            at, along = pick(xs, lambda x: x[0]), pick(ts, lambda x: x[0])
            all_vary = lambda *xs: [vary_over(x, frozenset({"i"})) for x in f(*xs)]
            out, t_out = jax.jvp(all_vary, at, along)
            index = jax.lax.axis_index("i")
            cts = [_cotangents(d, out) for d in range(N_DEVICES)]
            ct = [jnp.stack(pair)[index] for pair in zip(*cts, strict=True)]
            found = jax.vjp(all_vary, *at)[1](ct)
            stacked = jax.tree.map(lambda x: x[None], (out, t_out))
            return stacked, pick(found, lambda x: x[None])

        return shard_map(derive, in_specs=(specs, specs), out_specs=(Spec("i"), specs))(xs, ts)

    for derive in (outside, inside):
        got = jax.jit(derive)(xs, ts)
        eqgt.assert_trees_close(got, expected, tolerance=2e-4, scale=1.0)


def _cotangents(d, like):
    return _normals(2 + d, like)
