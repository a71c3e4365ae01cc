"""No shape leaks a tracer, or fails because one has escaped.

`tests/leaks` has the shapes: programs in which a custom derivative has failed somebody.
"""

import os
import pathlib
import subprocess
import sys

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.jet import jet  # noqa: TID251, there is no other way to it

from .helpers import checking_leaks
from .leaks import SHAPES
from .leaks.registry import check


ROOT = pathlib.Path(__file__).parents[1]
FLAGS = ("JAX_CUSTOM_JVP3", "JAX_CUSTOM_VJP3", "JAX_REMAT3")


@pytest.mark.parametrize("name", SHAPES)
def test_shape_under_the_leak_checker(name):
    check(name, checking_leaks)


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_shapes_with_flag(flag):
    """JAX's next implementation of each. A process of its own, since a flag is read when JAX is
    imported, and programs traced before do not know it."""
    if flag.lower() not in jax.config.values:
        pytest.skip(f"this JAX has no {flag}")
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.leaks"],
        cwd=ROOT,
        # Without the leak checker: the new `jax.checkpoint` of JAX 0.10 does not pass it.
        env={**os.environ, flag: "1", "JAX_CHECK_TRACER_LEAKS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


# ------------------------------------------------------------------ the checker is awake


def sin_that_keeps(kept):
    """A function with a rule that puts a tracer where it outlives the call."""

    f = eqg.custom_vjp(jnp.sin)

    @f.def_fwd
    def _fwd(x):
        kept.append(jnp.cos(x))
        return jnp.sin(x), kept[0]

    @f.def_bwd
    def _bwd(cos, ct):
        return (cos * ct,)

    return f


def test_a_tracer_that_a_rule_keeps_is_found():
    """A leak of the user's own making, which is not for us to cover up."""
    kept = []
    with checking_leaks(), pytest.raises(Exception, match="Leaked"):
        jax.jit(jax.grad(sin_that_keeps(kept)))(0.7)


def test_a_tracer_that_a_rule_keeps_can_not_be_used_in_another_program():
    f = sin_that_keeps([])
    with jax.check_tracer_leaks(False):
        jax.jit(jax.grad(f))(0.7)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        jax.jit(jax.grad(f))(jnp.ones(3)[0])


# ------------------------------------------------------------------ not ours to mend


def test_errors_are_leaks_to_the_checker():
    """In a trace within a trace, `jax.checking_leaks` replaces every error by one of its own,
    since the traceback holds tracers. So do not look for our messages there."""
    f = jax.custom_jvp(jnp.sin)

    @f.defjvp
    def _jvp(primals, tangents):
        raise ValueError("the message")

    with jax.check_tracer_leaks(False), pytest.raises(ValueError, match="the message"):
        jax.grad(jax.jit(f))(0.7)
    with checking_leaks(), pytest.raises(Exception, match="Leaked") as info:
        jax.grad(jax.jit(f))(0.7)
    assert "the message" in str(info.value.__context__)


def test_taylor_mode_is_at_fault_upstream():
    """`jax.experimental.jet` can't take any function with a forward rule:
    https://github.com/patrick-kidger/equinox/issues/1051. When this test fails, Taylor mode
    wants a shape in `tests/leaks`."""
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(*primals) * tangents[0]))
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        jet(f, (0.7,), ((1.0, 0.0),))
