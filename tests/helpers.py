"""Comparisons and measurements that several test files use."""

import contextlib
import gc
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import equinox as eqx
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest
from jax import monitoring


# How far two programs may be apart that round the operands of their matrix products to 23, 10
# or 7 bits after the binary point (bfloat16 has 8 with the one before it), whatever the dtype
# of the arrays. On a GPU, JAX rounds float32 to TF32 by default, which has 10. The tolerances
# of the other tests are those of float32, so `make bench VERSIONS=gpu` runs them with
# `jax_default_matmul_precision` "highest", which does not round.
MATMUL_EPS = {"float32": 2.0**-23, "tensorfloat32": 2.0**-10, "bfloat16": 2.0**-7}


def quick_only(values: Iterable[Any], quick: Container[Any], mark: Any) -> list[Any]:
    """The values as parameters of a test. Those that are not in `quick` have a mark."""
    return [pytest.param(x, marks=() if x in quick else mark) for x in values]


def unwrapped(report: Any) -> str:
    """A report without the line breaks of its sentences."""
    return re.sub(r"\n {4,}", " ", str(report))


def assert_close(
    got: Any, expected: Any, *, eps: float = 20.0, tolerance: float | None = None
) -> None:
    """`eqgt.assert_trees_close` of what comes from numbers around one, with a tolerance of so
    many `eps` of the coarsest dtype of `expected`, or the `tolerance` itself."""
    if tolerance is None:
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(expected) if eqx.is_array_like(x)]
        inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
        tolerance = eps * max((float(jnp.finfo(dtype).eps) for dtype in inexact), default=0.0)
    eqgt.assert_trees_close(got, expected, tolerance=tolerance, scale=1.0)


@contextlib.contextmanager
def checking_leaks():
    """`jax.checking_leaks`, without its cost: it looks at all objects after every trace.
    Objects that exist already, garbage or not, can be skipped."""
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    except IndexError as error:
        # JAX's search for what holds a leaked tracer crashes where only a frame holds it.
        if "list index out of range" not in str(error):
            raise
        raise RuntimeError("Leaked tracers, and JAX's report crashed") from error
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """A list with an entry for each program that JAX compiles, or reads from its cache."""
    found = []

    def listen(event, duration_secs, **kwargs):
        del duration_secs, kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        monitoring.unregister_event_duration_listener(listen)


def temp_bytes(fn: Any, *args: Any) -> int:
    """The bytes that the compiled program needs beyond its arguments and outputs."""
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def count_calls(fn: Callable, *args: Any) -> int:
    """How often the library calls a function, its own or another, in `fn(*args)`: what it has
    to do, as a number that does not depend on the machine."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        # At a call into C, `frame` is the one that calls.
        if event in ("call", "c_call"):
            count += frame.f_globals.get("__name__", "").startswith("eqx_grads.")

    sys.setprofile(profile)
    try:
        fn(*args)
    finally:
        sys.setprofile(None)
    return count


def assert_linear_in_size(fn: Callable[[int], Any], size: int) -> None:
    """The work of the library in `fn(n)` grows in proportion to `n`, up to `4 * size`."""
    fn(size)  # fills caches
    small, middle, large = (count_calls(fn, n) for n in (size, 2 * size, 4 * size))
    assert 0 < large - middle < 2.2 * (middle - small)


def skip_without_checkpointed_loops():
    """Diffrax uses Equinox's checkpointed `while_loop` by default. It has no derivative with
    `jax_custom_jvp3` and none with `jax_custom_vjp3`, which are experimental (Equinox 0.13.8,
    JAX 0.12; plain `jax.grad` fails too, and no upstream issue was found)."""
    for flag in ("jax_custom_jvp3", "jax_custom_vjp3"):
        if getattr(jax.config, flag, False):
            pytest.skip(f"Equinox's checkpointed loop can't be differentiated with `{flag}`")


def conds_keep_keys():
    """JAX 0.10.0 fails where a rule in a branch keeps a random key; 0.10.2 does not. No
    upstream issue was found. `check_gradients` has such branches to leave rules out."""

    @jax.custom_vjp
    def fn(x, key):
        return x * jax.random.uniform(key, dtype=x.dtype)

    fn.defvjp(lambda x, key: (fn(x, key), key), lambda key, ct: (fn(ct, key), None))
    in_branch = lambda x, key: jax.lax.cond(x > 0, fn, lambda x, key: x, x, key)
    try:
        jax.jit(jax.grad(in_branch)).lower(1.0, jax.random.key(0))
    except (TypeError, ValueError):
        return False
    return True


# With JAX 0.12. `jax.linear_transpose` of a `jax.checkpoint` fails too. No upstream issue was
# found.
REMAT3_HAS_NO_TRANSPOSE = (
    "With the experimental `jax_remat3`, a `jax.checkpoint` of a linear function has no "
    "transpose."
)


def fails_with_remat3(request: pytest.FixtureRequest, reason: str, strict: bool = True) -> None:
    if getattr(jax.config, "jax_remat3", False) and jax.__version_info__ >= (0, 11):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=strict))
