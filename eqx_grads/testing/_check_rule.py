"""`check_rule`: all checks of a rule in one call."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._diagnosis.progress import diagnosing, doing
from .._errors import check_flags, check_function, check_option, rule_error
from ._case import Case
from ._derivatives import forward, reverse
from ._kept import leaks, residuals
from ._options import as_names, as_seeds, Options
from ._oracle import without_log
from ._outcome import outcome
from ._report import broke, Finding, Report, skipped
from ._table import adjoint, linear, order, zeros
from ._transforms import transforms
from ._values import deterministic, finite, primal


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

_ALL = (primal, forward, reverse, adjoint, linear, zeros, order, transforms, leaks, residuals,
        finite, deterministic)  # fmt: skip
CHECKS = {check.__name__: check for check in _ALL}


def check_rule(
    fn: Callable[..., Any],
    /,
    *args: Any,
    checks: Collection[str] | None = None,
    skip: Collection[str] = (),
    reference: Callable[..., Any] | None = None,
    nonlinear: bool = False,
    nondifferentiable: Collection[str] = (),
    tangents: Any = None,
    cotangents: Any = None,
    order: int = 2,
    at: Sequence[Any] = (),
    max_residual_bytes: int | None = None,
    tolerance: float | None = None,
    seed: int | Sequence[int] = 0,
    raises: bool = True,
    **kwargs: Any,
) -> Report:
    """Check the rule of `fn` at these arguments: its derivatives, its residuals, no leaks.

    `fn` may have a rule of any kind (`eqg`, `eqx.filter_custom_*`, raw `jax.custom_*`) or no
    rule, or call functions that have rules. It may be a Module or a bound method, whose arrays
    are then checked like arguments.

    | check | question |
    |---|---|
    | `primal` | Is the value with the rule the value of the function, static leaves included? |
    | `forward`, `reverse` | Does each mode agree with plain autodiff, or with differences? |
    | `adjoint` | Is reverse mode the transpose of forward mode? |
    | `linear` | Is the derivative linear in the tangent, and in the cotangent? |
    | `zeros` | Is it right with one leaf perturbed or one output used, and with all others? |
    | `order` | Are higher derivatives right, in every order of the modes? |
    | `transforms` | Are the results the same under the transformations of JAX? |
    | `leaks` | Does it keep tracers alive, or compile again in each call? |
    | `residuals` | Which arrays are kept for the backward pass, and are all of them read? |
    | `finite` | Are value and derivatives finite, at the points `at` as well? |
    | `deterministic` | Do repeated calls return the same? |

    Plain autodiff differentiates the function without its rule, and differences are finite
    differences. At a kink, a derivative between the slopes of both sides is right, if the
    arguments have at most 24 entries. `zeros` also fails if equations are left for leaves that
    are not perturbed. The transformations are `jit`, `vmap`, `scan`, `cond` and `checkpoint`.
    `finite` also runs under `jax.debug_nans`. A second derivative passes it if float64 shows a
    number that is too large for your dtype.

    !!! example

        ```python
        import eqx_grads as eqg
        import eqx_grads.testing as eqgt
        import jax.numpy as jnp

        @eqg.custom_jvp
        def f(x, y):
            return jnp.sin(x) * y

        @f.def_jvp
        def f_jvp(primals, tangents):
            x, y = primals
            t_x, t_y = tangents
            return f(x, y), jnp.cos(x) * y * t_x  # and the term of y?

        report = eqgt.check_rule(f, 1.0, 2.0, checks=("forward",), raises=False)
        assert not report.passed
        assert "the term of `y` is missing" in str(report)
        ```

    The function is traced in the precision of your arguments. Its program is evaluated in
    float64, and compared by the error of [`eqx_grads.testing.assert_trees_close`][], which does
    not grow with the size of an array. Then it is evaluated in your precision, and compared
    with a tolerance that rounding explains. A function that calls the host is traced with
    float64 arguments, too.

    **Arguments:**

    - `fn`, `*args`, `**kwargs`: the function and its arguments, any PyTrees. Every inexact
        leaf of a positional parameter is perturbed; keyword-only arguments are configuration.
        Use `functools.partial` if a parameter of `fn` has one of the names below.
    - `checks`, `skip`: the names of the checks to run, by default all, and of the checks to
        skip.
    - `reference`: a function of the same arguments and keywords whose autodiff is the
        expected derivative. Use it for a rule that is wrong on purpose (straight-through,
        surrogate, reversal), and for a solver that stops at a tolerance, whose differences
        are too noisy. It may have a rule, which then gives the expected derivative. For a
        bound method, or a Module with arrays, another method of the same object.
    - `nonlinear`: whether the backward rule is meant to be non-linear in the cotangent, as
        clipping is. Skips `adjoint`, `order` and the part of `linear` about cotangents. With a
        `reference`, 4096 times larger and smaller cotangents are compared, too.
    - `nondifferentiable`: names of parts that are not perturbed: positional parameters, or
        parts of them as the report names them, such as `"self.frozen"` or `"params['scale']"`.
        The arguments of a ufunc are `args[0]`, `args[1]` and so on.
    - `tangents`, `cotangents`: additional directions, trees like `args` and like the output.
    - `order`: the highest order of derivatives to check.
    - `at`: further points for `finite`, such as kinks and singularities, each a tuple of the
        arguments of a call, without `self`.
    - `max_residual_bytes`: the largest number of bytes that may be kept for one backward pass,
        without the arguments.
    - `tolerance`: the largest relative error that passes. By default 1e-5 in float64. For
        float64 arguments it is 1e-7, or 1e-9 where the reference is autodiff, which is then
        good to 1e-15. In other precisions, and in the numbers of a half-precision program, by
        default the error that rounding explains. Raise it for functions that are themselves
        approximations, for example iterative solvers.
    - `seed`: the seed of the random directions, or several seeds, for example `range(20)`. The
        checks of derivatives are run for each seed, the others for the first one.
    - `raises`: whether to raise when a check fails.

    The line of `residuals` has the bytes that are kept from the forward pass for the backward
    pass of one call, without the arguments themselves. It also has the bytes that autodiff of
    the function without its rule would keep, if it has a derivative.

    On a terminal, a line says which check is running if all of them take more than two seconds.

    **Returns:**

    A [`eqx_grads.testing.Report`][]. `forward` and `reverse` may have no reference, for example
    if a host function raises an error at arguments close by. The first line is then "passed,
    without a reference for the derivative", and their rows say why. Then pass `reference=`.

    **Raises:**

    [`eqx_grads.testing.RuleCheckError`][], an `AssertionError` with the report; an
    `eqx_grads.RuleError` for options that make no sense.
    """
    check_function(fn, "fn", "check_rule")
    check_flags("check_rule", raises=raises)
    names = _chosen(checks, skip)
    options = Options(
        reference, nonlinear, nondifferentiable, tangents, cotangents, order, at,
        max_residual_bytes, tolerance,
    )  # fmt: skip
    seeds = as_seeds("check_rule", seed)
    case = Case(fn, args, kwargs, options, seeds[0])
    if not case.subject.leaves:
        raise rule_error(
            f"`{case.subject.name}` was given nothing that can be differentiated.",
            f"its positional arguments are {len(case.subject.args)} without inexact leaves",
            do="Pass floating-point arrays by position.",
        )
    findings: list[Finding] = []
    with diagnosing("check_rule"), without_log():
        for one in (case, *(case.changed(seed=s) for s in seeds[1:])):
            for name in names if one is case else [n for n in names if n in _DIRECTED]:
                doing(f"the check `{name}`,", names.index(name), len(names))
                findings += _run(name, one)
    report = Report(case.subject.name, findings, {"seed": seed, "leaves": case.names})
    if raises:
        report.raise_if_failed()
    return report


# The checks along random directions, which compile nothing new for another direction.
_DIRECTED = ("forward", "reverse", "adjoint", "linear", "order")
# The text for an exception that a check does not handle.
_WHERE = {"forward": "the tangents", "reverse": "the cotangents"}


def _run(name: str, case: Case) -> list[Finding]:
    def run():
        why = _why_not(name, case)
        return [skipped(why)] if why else CHECKS[name](case)

    findings: list[Finding] = []
    error = outcome(lambda: findings.extend(run()))
    if isinstance(error, Exception):
        findings.append(broke(_WHERE.get(name, "the whole check"), error))
    findings = findings or [skipped("nothing to check")]
    return [dataclasses.replace(finding, check=name) for finding in findings]


def _why_not(name: str, case: Case) -> str:
    """Why a check does not apply to a function, if it does not."""
    if outcome(lambda: case.outputs) == []:
        return "no output has a derivative"
    if name == "forward":
        return case.why_no_forward
    if name == "zeros" and max(len(case.names), len(case.outputs)) < 2:
        return "one leaf and one output: there are no subsets"
    # If a gradient is not a derivative, the orders of the modes differ.
    if name in ("adjoint", "order") and case.options.nonlinear:
        return "the backward rule is declared non-linear"
    if name in ("order", "residuals") and not case.has_reverse:
        return "there is no reverse mode"
    if name == "adjoint" and not (case.has_forward and case.has_reverse):
        return "only one mode is offered"
    if name == "adjoint" and case.options.reference is not None and case.forward_is_of_function:
        return "forward mode is the derivative of the function"
    return ""


def _chosen(checks: Collection[str] | None, skip: Collection[str]) -> Sequence[str]:
    wanted = tuple(CHECKS) if checks is None else as_names("check_rule", "checks", checks)
    left_out = as_names("check_rule", "skip", skip)
    for option, given in (("checks", wanted), ("skip", left_out)):
        for name in given:
            check_option("check_rule", option, name, CHECKS)
    names = [name for name in CHECKS if name in wanted and name not in left_out]
    if not names:
        raise rule_error(
            "`check_rule` was told to check nothing.",
            f"`checks` is {checks!r:.60}, `skip` is {skip!r:.60}",
            do="Leave `checks` out to run all of them.",
        )
    return names


# ---------------------------------------------------------------- one check alone


def check_forward(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check forward mode against autodiff without the rule and against finite differences.

    `check_rule(fn, *args, checks=("forward",), **kwargs)`; see
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

    `check_rule(fn, *args, checks=("reverse",), **kwargs)`; see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("reverse",), **kwargs)


def check_adjoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that reverse mode is the transpose of forward mode, `<J v, w> = <v, J' w>`.

    `check_rule(fn, *args, checks=("adjoint",), **kwargs)`; see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("adjoint",), **kwargs)


def check_linear(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that the derivative is linear in the tangent and in the cotangent.

    `check_rule(fn, *args, checks=("linear",), **kwargs)`; see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("linear",), **kwargs)


def check_transforms(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that every transformation gives the results of eager calls.

    `check_rule(fn, *args, checks=("transforms",), **kwargs)`; see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("transforms",), **kwargs)


def check_leaks(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Check that no tracer outlives its trace, and that repeated calls compile nothing.

    `check_rule(fn, *args, checks=("leaks",), **kwargs)`; see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors.
    """
    return check_rule(fn, *args, checks=("leaks",), **kwargs)


def check_residuals(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
    """Count the bytes of the residuals; fail if the backward pass never reads some of them.

    `check_rule(fn, *args, checks=("residuals",), **kwargs)`; see
    [`eqx_grads.testing.check_rule`][] for arguments, options and errors. The finding of the
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
