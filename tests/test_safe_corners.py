"""Second derivatives at kinks, poles and coincident points: right, or NaN, in all four
compositions of the two modes."""

import importlib.util
import pathlib
import re

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest


pytestmark = pytest.mark.x64


safe = eqg.safe
INF = jnp.inf

SECOND = {
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
}


def _all_second(f, x):
    """The Hessians of a function of a vector, compiled and differentiated under `vmap`."""
    found = jax.jit(lambda x: [d(f)(x) for d in SECOND.values()])(x)
    batched = [jax.vmap(d(f))(jnp.stack([x, x]))[1] for d in SECOND.values()]
    return [np.asarray(h) for h in (*found, *batched)]


# ---------------------------------------------------------------- what is computed from a norm


@pytest.mark.parametrize(
    "smooth",
    [
        lambda z: safe.norm(z) ** 2,
        lambda z: safe.sqrt(z @ z) ** 2,
        lambda z: jnp.exp(-(safe.norm(z) ** 2) / 2),
        lambda z: (1 + safe.norm(z)) * jnp.exp(-safe.norm(z)),
        lambda z: safe.norm(z**2),
    ],
)
def test_no_smooth_function_of_a_norm_has_a_wrong_hessian(smooth):
    """It is NaN: the norm does not know what is computed from it."""
    assert (jax.grad(smooth)(jnp.zeros(2)) == 0).all()
    for hessian in _all_second(smooth, jnp.zeros(2)):
        assert np.isnan(hessian).any(0).all()


def test_outside_of_the_domain_all_derivatives_are_zero():
    """They are zero everywhere there, and so is their derivative."""
    for fn, x in [
        *((f, -1.0) for f in (safe.sqrt, safe.log, safe.log_expm1, safe.entropy)),
        *((f, 2.0) for f in (safe.arccos, safe.arcsin)),
        (safe.log1p_ratio, -2.0),
        (lambda x: safe.log_sub_exp(x, 1.0), 0.0),
        (lambda x: safe.power(x, 0.5), -1.0),
    ]:
        axis = {"axis": None} if fn is safe.entropy else {}
        assert jax.grad(jax.grad(lambda x, fn=fn, axis=axis: fn(x, **axis)))(x) == 0
    # An infinite argument does not move.
    for x in ([-INF, -INF], [-INF, 1.0], [INF, 1.0]):
        hessian = jax.hessian(lambda x: safe.logsumexp(x) + safe.log_softmax(x)[0])
        assert (hessian(jnp.array(x)) == 0).all()


# ---------------------------------------------------------------- what does not reach a corner


def test_what_is_constant_makes_no_nan():
    """A norm that is not differentiated, and a mask on its argument."""
    x, y = jnp.array([1.0, 2.0]), jnp.zeros(2)
    loss = lambda x, y: jnp.sum(x**3) * (1 + safe.norm(y) + safe.std(y) + safe.sqrt(y[0]))
    for second in SECOND.values():
        np.testing.assert_allclose(second(lambda x: loss(x, y))(x), np.diag(6 * x))
    masked = lambda x: safe.where(x > 0, safe.sqrt, x, 0.0).sum()
    for second in SECOND.values():
        hessian = second(masked)(jnp.array([0.0, 4.0]))
        np.testing.assert_allclose(hessian, np.diag([0.0, -1 / 32]))
    # Of masked events, an entropy is a constant.
    entropy = lambda p: safe.entropy(p, where=p > 0)
    for second in SECOND.values():
        hessian = second(entropy)(jnp.array([0.0, 0.5]))
        np.testing.assert_allclose(hessian, np.diag([0.0, -2.0]))
    std = lambda x: safe.std(x, where=jnp.array([True, False]))
    for second in SECOND.values():
        assert (second(std)(jnp.array([3.0, 1.0])) == 0).all()


# ---------------------------------------------------------------- kernels of a distance

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "my-gradient-is" / "nan.md"
# The kernels of a distance, and the factor `c` of `1 - c r**2 + ...`, if it is smooth.
KERNELS = {
    "Matern 1/2": (lambda r: mp.exp(-r), None),
    "Matern 3/2": (lambda r: (1 + mp.sqrt(3) * r) * mp.exp(-mp.sqrt(3) * r), 3 / 2),
    "Matern 5/2": (
        lambda r: (1 + mp.sqrt(5) * r + 5 * r**2 / 3) * mp.exp(-mp.sqrt(5) * r),
        5 / 6,
    ),
    "RBF": (lambda r: mp.exp(-r * r / 2), 1 / 2),
}


@pytest.fixture(scope="module")
def kernels():
    """Those of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"eqg": eqg, "jax": jax, "jnp": jnp}
    exec(next(block for block in blocks if "matern52" in block), names)
    return names["kernels"]


def _of_both(kernel):
    return lambda z: kernel(z[:2], z[2:])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_where_points_coincide(name, kernels):
    """By both points: `d2k/dx dx` is minus `d2k/dx dx'`. In all modes, compiled, batched."""
    truth, factor = KERNELS[name]
    with jax.enable_x64(), mp.workdps(120):
        f, z = _of_both(kernels[name]), jnp.array([0.3, -1.0, 0.3, -1.0])
        assert (jax.grad(f)(z) == 0).all()
        assert (jax.jacfwd(f)(z) == 0).all()
        for got in _all_second(f, z):
            if factor is None:
                assert np.isnan(got).all()
                continue
            curvature = float(mp.diff(lambda r: truth(abs(r)), mp.mpf("1e-30"), 2, h="1e-32"))
            np.testing.assert_allclose(curvature, -2 * factor, rtol=1e-8)
            expected = -2 * factor * np.kron([[1, -1], [-1, 1]], np.eye(2))
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        third = jax.jacfwd(jax.hessian(f))(z)
        if name in ("Matern 5/2", "RBF"):
            np.testing.assert_allclose(third, 0, atol=1e-12)
        else:
            assert jnp.isnan(third).any()


# ---------------------------------------------------------------- the table of the page


@pytest.fixture
def script():
    """The script that writes the table of `docs/api/safe.md`."""
    path = pathlib.Path(__file__).parents[1] / "docs" / "safe_table.py"
    spec = importlib.util.spec_from_file_location("safe_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_jax(text):
    """The results of plain JAX differ between its versions."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row[:4] + row[5:]] for row in rows]


@pytest.mark.slow
def test_the_table_is_up_to_date(script):
    page = script.PAGE.read_text()
    written = page.split(script.START)[1].split(script.END)[0]
    assert _without_jax(written) == _without_jax(script.table()), "python docs/safe_table.py"


def test_ours_is_the_truth_wherever_there_is_one(script):
    page = script.PAGE.read_text()
    rows = _without_jax(page.split(script.START)[1].split(script.END)[0])[2:]
    assert len(rows) == len(script.ROWS)
    for *what, ours, truth, _ in rows:
        expected = "0" if "∞" in truth or truth == "none" else truth
        assert ours == expected, what
