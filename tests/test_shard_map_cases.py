"""Every registered op inside `jax.shard_map`: one argument varies over the mesh, the others are
replicated. Value, tangent and cotangents are those of the same calls one after another."""

import functools as ft

import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._jaxprs.varying import vary_over
from eqx_grads.testing._subject import FlatFunction
from jax.sharding import AxisType, PartitionSpec as Spec

from .cases import CASES


N_DEVICES = 2
MESH = jax.make_mesh((N_DEVICES,), ("i",), axis_types=(AxisType.Auto,))
QUICK = (
    "custom_vjp",
    "scale_gradient",
    "clip_gradient",
    "host_function",
    "losses.chunked",
    "implicit",
)
OWN_MESH = ("psum_gradient",)


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.clear_caches()


def _parameters():
    for name in CASES:
        if name in OWN_MESH:
            continue
        marks = () if name in QUICK else pytest.mark.slow
        yield pytest.param(name, -1, True, "jit", id=f"{name}", marks=marks)
        slow = pytest.mark.slow
        yield pytest.param(name, 0, True, "jit", id=f"{name}, the first varies", marks=slow)
        yield pytest.param(name, -1, False, "jit", id=f"{name}, unchecked", marks=slow)
        if name in QUICK:
            yield pytest.param(name, -1, True, "eager", id=f"{name}, eager", marks=slow)


def _normals(seed, xs):
    keys = jr.split(jr.key(seed), len(xs))
    return [jr.normal(key, x.shape, x.dtype) for key, x in zip(keys, xs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which", "check_vma", "mode"), list(_parameters()))
def test_op(name, which, check_vma, mode):
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
    shard_map = ft.partial(jax.shard_map, mesh=MESH, check_vma=check_vma)

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
            all_vary = lambda *xs: [
                vary_over(x, frozenset({"i"}) if check_vma else frozenset()) for x in f(*xs)
            ]
            out, t_out = jax.jvp(all_vary, at, along)
            index = jax.lax.axis_index("i")
            cts = [_cotangents(d, out) for d in range(N_DEVICES)]
            ct = [jnp.stack(pair)[index] for pair in zip(*cts, strict=True)]
            found = jax.vjp(all_vary, *at)[1](ct)
            if not check_vma:  # as for any function, the user sums
                sum_up = lambda x, v: x if v else jax.lax.psum(x, "i")
                found = [sum_up(x, v) for x, v in zip(found, varies, strict=True)]
            stacked = jax.tree.map(lambda x: x[None], (out, t_out))
            return stacked, pick(found, lambda x: x[None])

        return shard_map(derive, in_specs=(specs, specs), out_specs=(Spec("i"), specs))(xs, ts)

    for derive in (outside, inside):
        got = (jax.jit(derive) if mode == "jit" else derive)(xs, ts)
        eqgt.assert_trees_close(got, expected, tolerance=2e-4, scale=1.0)


def _cotangents(d, like):
    return _normals(2 + d, like)
