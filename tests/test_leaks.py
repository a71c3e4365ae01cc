"""No shape leaks a tracer, or fails because one has escaped.

`tests/leaks` has the shapes: programs in which a custom derivative has failed somebody.
"""

import functools as ft
import os
import pathlib
import subprocess
import sys

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.jet import jet  # noqa: TID251, there is no other way to it

from .leaks import SHAPES
from .leaks.registry import check, Faulty


ROOT = pathlib.Path(__file__).parents[1]
FLAGS = ("JAX_CUSTOM_JVP3", "JAX_CUSTOM_VJP3", "JAX_REMAT3")
SHAPES_TO_COUNT_ON = 60


@pytest.mark.parametrize("checker", [None, jax.checking_leaks], ids=["plain", "checked"])
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name, checker):
    try:
        check(SHAPES[name], *([] if checker is None else [checker]))
    except Faulty as fault:
        pytest.xfail(str(fault))


def test_there_are_shapes():
    assert len(SHAPES) >= SHAPES_TO_COUNT_ON


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_shapes_with_flag(flag):
    """JAX's next implementation of each. A process of its own, since a flag is read when
    JAX is imported, and what was traced before knows nothing of it."""
    if flag.lower() not in jax.config.values:
        pytest.skip(f"this JAX has no {flag}")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.leaks"],
        cwd=ROOT,
        env={**os.environ, flag: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


# ------------------------------------------------------------------ the checker is awake


def storing(kept):
    """A function with a rule that gives its tangent away by the back door."""
    f = eqg.custom_jvp(jnp.sin)

    @f.def_jvp
    def _jvp(primals, tangents):
        (x,), (t_x,) = primals, tangents
        kept.append(t_x)
        return jnp.sin(x), jnp.cos(x) * t_x

    return f


def test_a_tracer_kept_by_a_rule_is_found():
    """A leak of the user's own making, which we must not cover up."""
    kept = []
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        jax.jit(jax.grad(storing(kept)))(0.7)


def test_a_tracer_kept_in_a_cache_is_an_error():
    """It is used again in another program, where it means nothing."""

    @ft.lru_cache
    def cached_cos(_, x):
        return [jnp.cos(x)]

    f = eqg.custom_vjp(jnp.sin)
    first = []

    @f.def_fwd
    def _fwd(x):
        first.append(jnp.cos(x))
        return jnp.sin(x), first[0]

    @f.def_bwd
    def _bwd(cos, ct):
        return (cos * ct,)

    del cached_cos
    jax.jit(jax.grad(f))(0.7)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        jax.jit(jax.grad(f))(jnp.ones(()))


# ------------------------------------------------------------------ not ours to mend


def raw_sin():
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(primals[0]) * tangents[0]))
    return f


def test_taylor_mode_is_at_fault_upstream():
    """`jax.experimental.jet` can't take any function with a forward rule:
    https://github.com/patrick-kidger/equinox/issues/1051. When this test fails, Taylor mode
    wants a shape in `tests/leaks`."""
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        jet(raw_sin(), (0.7,), ((1.0, 0.0),))
