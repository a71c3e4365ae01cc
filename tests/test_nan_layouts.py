"""Which elements depend on which is told without tracing a derivative, and as it says."""

import types

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads._diagnosis._nan import trace_back
from eqx_grads._diagnosis._nan.layouts import IN_NUMPY, pull_back, push_forward


ones = jnp.ones
CASES = {
    "batched product": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (2, 3, 4), (2, 5, 4)),
    "mixed axes": (lambda x, y: jnp.einsum("ijb,kjbl->bikl", x, y), (3, 4, 2), (5, 4, 2, 6)),
    "inner product": (lambda x, y: x @ y, (3,), (3,)),
    "matrix and vector": (lambda x, y: x @ y, (2, 3), (3,)),
    "outer product": (lambda x, y: jnp.einsum("i,j->ij", x, y), (2,), (3,)),
    "sum": (lambda x: x.sum(1), (2, 3, 4)),
    "sum of all": (lambda x: x.sum(), (2, 3)),
    "max": (lambda x: x.max((0, 2)), (2, 3, 4)),
    "prod": (lambda x: jax.lax.reduce_prod(x, (0,)), (2, 3)),
    "transpose": (lambda x: jnp.transpose(x, (2, 0, 1)), (2, 3, 4)),
    "axes of size one": (lambda x: jax.lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), (2, 1)),
    "number": (lambda x: jax.lax.broadcast_in_dim(x, (4, 2), ()), ()),
    "reshape": (lambda x: x.reshape(6), (2, 3)),
    "squeeze": (lambda x: x.squeeze(1), (2, 1, 3)),
    "neg": (lambda x: -x, (2,)),
    "slice": (lambda x: x[1:, :3], (3, 4)),
    "strides": (lambda x: jax.lax.slice(x, (0, 1), (5, 6), (2, 3)), (5, 7)),
    "concatenate": (lambda x, y, z: jnp.concatenate([x, y, z], 1), (2, 3), (2, 1), (2, 4)),
    "split": (lambda x: jnp.split(x, [1, 4], 1), (2, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_dependence_in_numpy_is_that_of_the_derivative_at_ones(name):
    fn, *shapes = CASES[name]
    rng = np.random.default_rng(0)
    n_compared = 0
    for eqn in jax.make_jaxpr(fn)(*map(ones, shapes)).eqns:
        if eqn.primitive.name not in IN_NUMPY:
            continue
        operands = [ones(v.aval.shape) for v in eqn.invars]
        frame = types.SimpleNamespace(
            node=types.SimpleNamespace(eqns=[eqn]), operands=[operands]
        )
        for i in range(3):
            output = i % len(eqn.outvars)
            mask = np.asarray(rng.random(eqn.outvars[output].aval.shape) < 0.3)
            elements = trace_back.Elements(frame, 0, output, mask)
            for k, x in enumerate(operands):
                got = trace_back.depends_on(elements, k)
                assert got.shape == x.shape
                np.testing.assert_array_equal(got, trace_back._pull_back(elements, k))
                inner = np.asarray(rng.random(x.shape) < 0.3)
                want = trace_back._push_forward(elements, k, inner) & mask
                np.testing.assert_array_equal(trace_back.reached_by(elements, k, inner), want)
                n_compared += 1
    assert n_compared


@pytest.mark.parametrize("transform", ["fft", "rfft", "irfft", "fft2"])
def test_dependence_of_a_fourier_transform(transform):
    """At ones, its derivative along an axis is zero but for one entry: roots of unity cancel.
    The logarithm was said to be bad in half of the elements, and the transform in the rest."""
    of_last = lambda x: getattr(jnp.fft, transform)(x)
    loss = lambda x: jnp.sum(jnp.abs(of_last(jnp.log(x))))
    x = jnp.ones((2, 4, 8)).at[0, 1].set(-1.0)
    n_bad = int(jnp.isnan(jnp.log(x)).sum())
    (record,) = eqg.explain_nan(loss, x).found
    assert (record.primitive, record.n_bad) == ("log", n_bad)
    # The entries that become NaN are those that a NaN in the operand reaches.
    (eqn,) = [e for e in jax.make_jaxpr(of_last)(x).eqns if e.primitive.name in ("fft", "jit")]
    while eqn.primitive.name == "jit":
        (eqn,) = [e for e in eqn.params["jaxpr"].eqns if e.primitive.name in ("fft", "jit")]
    operand = jnp.ones(eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype)
    mask = np.zeros(operand.shape, bool)
    mask[0, 1, 0] = True
    out = eqn.primitive.bind(jnp.where(mask, jnp.nan, operand), **eqn.params)
    want = ~np.isfinite(np.asarray(out))
    got = push_forward(eqn, 0, mask, want.shape)
    np.testing.assert_array_equal(got, want)
    pulled = pull_back(eqn, 0, mask.shape, want)
    assert pulled[mask].all()
    assert not pulled[1].any()


def test_no_derivative_is_traced_for_layouts(monkeypatch):
    """It was one for each operand of each equation that is followed, and took minutes."""
    n_traced = []
    pull_back = trace_back._pull_back

    def counted(*args):
        n_traced.append(args)
        return pull_back(*args)

    monkeypatch.setattr(trace_back, "_pull_back", counted)

    def loss(w, x):
        p = jax.nn.softmax(jnp.where(x > 0, (x @ w).T, -jnp.inf), axis=-1)
        return jnp.sum((p @ w).reshape(-1) ** 2)

    report = eqg.explain_nan(loss, jnp.eye(3), jnp.ones((3, 3)).at[0].set(0.0))
    assert report.found
    assert not n_traced
