"""`check_rule` of complex functions on the host, whose reference is finite differences.

The rules follow JAX, where a pairing is the real part of the sum of products without
conjugation; `test_the_right_rules_are_right` compares them with the same function in
`jax.numpy`.
"""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads.testing._differences import directional


DERIVATIVES = ("forward", "reverse", "adjoint")
Z = jnp.array([0.3 + 0.2j, 1.0 - 0.5j])
X = jnp.array([0.3, 1.2])


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def _mixed(z, ct):
    return ct * abs(z) + np.real(ct * z) * np.conj(z) / abs(z)


# The function of `m`, which is NumPy or `jax.numpy`; its outputs; its cotangent; its argument.
CASES = {
    "exp": (lambda m, z: m.exp(z), lambda z: z, lambda z, ct: ct * np.exp(z), Z),
    "conj": (lambda m, z: m.conj(z), lambda z: z, lambda z, ct: np.conj(ct), Z),
    "z |z|": (lambda m, z: z * m.abs(z), lambda z: z, _mixed, Z),
    "to real": (
        lambda m, z: m.abs(z) ** 2, lambda z: z.real, lambda z, ct: 2 * ct * np.conj(z), Z
    ),
    "to complex": (
        lambda m, x: m.exp(1j * x), lambda x: 1j * x,
        lambda x, ct: np.real(1j * ct * np.exp(1j * x)), X,
    ),
}  # fmt: skip


def _with_bwd(name, change=lambda ct: ct):
    fn, out, pull, x = CASES[name]
    plain = lambda x: fn(jnp, x)
    f = eqg.host_function(lambda x: fn(np, x), out=lambda x: jax.eval_shape(out, x))

    @f.def_bwd
    def _(residuals, ct):
        (x,) = residuals
        return (change(pull(x, ct)).astype(x.dtype),)

    return f, plain, x


@pytest.mark.parametrize("name", CASES)
def test_complex_rules_of_host_functions(name):
    f, plain, x = _with_bwd(name)
    want, pull_plain = jax.vjp(plain, x)
    ct = want * (0.7 - 0.4j) if jnp.iscomplexobj(want) else want + 0.3
    eqgt.assert_trees_close(jax.vjp(f, x)[1](ct), pull_plain(ct))
    report = eqgt.check_rule(f, x, order=1, checks=DERIVATIVES)
    assert report["reverse"][0].verdict == "passed"
    for change in (np.conj, lambda ct: 1.01 * ct):
        if change is np.conj and name == "to complex":  # of a real argument
            continue
        f, _, x = _with_bwd(name, change)
        report = eqgt.check_rule(f, x, order=1, checks=("reverse",), raises=False)
        assert not report.passed
        assert "the shape is" not in str(report)


def test_differences_of_complex_values():
    z, t = np.array([0.3 + 0.2j, 1.0]), np.array([0.1 - 0.2j, 0.3j])
    for rounded_to in (None, np.float32):
        (found,), *_ = directional(lambda z: [np.exp(z)], [z], [t], rounded_to)
        np.testing.assert_allclose(found, np.exp(z) * t, rtol=1e-4)
