"""The checks one by one, for a test that is about one thing."""

from collections.abc import Callable
from typing import Any

from ._check_rule import check_rule
from ._report import Report


def check_forward(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check forward mode against autodiff without the rule and against finite differences.

    `check_rule(fn, *args, checks=("forward",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.

    !!! example

        ```python
        import eqx_grads.testing as eqgt
        import jax.numpy as jnp

        eqgt.check_forward(jnp.tanh, jnp.arange(3.0))
        ```
    """
    return check_rule(fn, *args, checks=("forward",), **kwargs)


def check_reverse(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check reverse mode against autodiff without the rule and against finite differences.

    `check_rule(fn, *args, checks=("reverse",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("reverse",), **kwargs)


def check_adjoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that reverse mode is the transpose of forward mode, `<J v, w> = <v, J' w>`.

    `check_rule(fn, *args, checks=("adjoint",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("adjoint",), **kwargs)


def check_linear(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that the derivative is linear in the tangent and in the cotangent.

    `check_rule(fn, *args, checks=("linear",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("linear",), **kwargs)


def check_transforms(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that the rule is the same under every transformation as it is eagerly.

    `check_rule(fn, *args, checks=("transforms",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("transforms",), **kwargs)


def check_leaks(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that no tracer outlives its trace, and nothing is compiled in each call.

    `check_rule(fn, *args, checks=("leaks",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("leaks",), **kwargs)


def check_residuals(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Count what is kept for the backward pass; fail where some of it is never read.

    `check_rule(fn, *args, checks=("residuals",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors; the finding of the
    report says how many bytes a call and a scan step keep, and how many plain autodiff does.

    !!! example

        ```python
        import eqx_grads.testing as eqgt
        import jax.numpy as jnp

        x = jnp.arange(3.0, dtype="float32")
        report = eqgt.check_residuals(jnp.sin, x, max_residual_bytes=12)
        print(report["residuals"][0].where)
        ```
    """
    return check_rule(fn, *args, checks=("residuals",), **kwargs)
