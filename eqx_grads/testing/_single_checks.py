"""The checks of `check_rule` one by one, for a test that is about one property."""

from collections.abc import Callable
from typing import Any

from ._check_rule import check_rule
from ._report import Report


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


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
    """Check that the results under every transformation are those of eager calls.

    `check_rule(fn, *args, checks=("transforms",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("transforms",), **kwargs)


def check_leaks(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that no tracer outlives its trace, and that repeated calls compile nothing.

    `check_rule(fn, *args, checks=("leaks",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("leaks",), **kwargs)


def check_residuals(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Count the bytes of the residuals; fail if the backward pass never reads some of them.

    `check_rule(fn, *args, checks=("residuals",), **kwargs)`, see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors; the finding of the
    report says how many bytes a call and a scan step keep, with the rule and without it.

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
