"""One call that says whether a rule is right, linear, cheap and leak-free."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .._errors import rule_error
from ._case import Case, Options
from ._checks.derivative import check_forward, check_reverse
from ._checks.leaks import check_leaks
from ._checks.linear import check_adjoint, check_linear
from ._checks.order import check_order
from ._checks.primal import check_primal
from ._checks.residuals import check_residuals
from ._checks.transforms import check_transforms
from ._checks.values import check_deterministic, check_finite
from ._checks.zeros import check_zeros
from ._findings import broke, skipped
from ._report import FAILED, Finding, Report


CHECKS = {
    "primal": check_primal,
    "forward": check_forward,
    "reverse": check_reverse,
    "adjoint": check_adjoint,
    "linear": check_linear,
    "zeros": check_zeros,
    "order": check_order,
    "transforms": check_transforms,
    "leaks": check_leaks,
    "residuals": check_residuals,
    "finite": check_finite,
    "deterministic": check_deterministic,
}


def check_rule(
    fn: Callable[..., Any],
    /,
    *args: Any,
    checks: Collection[str] | None = None,
    skip: Collection[str] = (),
    reference: Callable[..., Any] | None = None,
    expected_tangent: Callable[..., Any] | None = None,
    expected_cotangent: Callable[..., Any] | None = None,
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
    """Check the rule of `fn` at these arguments, in every way that a rule can be wrong.

    `fn` may have rules of any kind (`eqg`, `eqx.filter_custom_*`, raw `jax.custom_*`), or
    none, or call functions that have some; it may be a method, a Module or a bound method,
    whose own arrays are then checked like arguments.

    | check | what it asks |
    |---|---|
    | `primal` | is the value with the rule the value of the function, static leaves too |
    | `forward`, `reverse` | do both modes agree with autodiff of the bare function |
    | | and with finite differences |
    | `adjoint` | is reverse mode the transpose of forward mode |
    | `linear` | is the derivative linear in the tangent, and in the cotangent |
    | `zeros` | is it right for each subset of perturbed leaves and used outputs, |
    | | without work for the others |
    | `order` | are higher derivatives right, in all orders of the modes |
    | `transforms` | is it the same under `jit`, `vmap`, `scan`, `cond`, |
    | | `checkpoint`, sharding |
    | `leaks` | does it keep tracers alive, compile again, give results that can't be copied |
    | `residuals` | what is kept for the backward pass, and is all of it read |
    | `finite` | is every number finite, at `at` too, and under `jax.debug_nans` |
    | `deterministic` | is it the same twice |

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

    Derivatives are computed in float64 where the function can be run so, and compared with
    the size-free error of [`eqx_grads.testing.assert_trees_close`][]; then once more in the
    precision of your arguments, with a tolerance that rounding explains.

    **Arguments:**

    - `fn`, `*args`, `**kwargs`: the function and its arguments, any PyTrees. Every inexact
        leaf of a positional parameter is perturbed; keyword-only arguments are configuration.
        Use `functools.partial` if a parameter of `fn` has one of the names below.
    - `checks`, `skip`: names of the checks to run, all by default, and of those not to.
    - `reference`: for a rule that is wrong on purpose (straight-through, surrogate,
        reversal): a function of the same arguments whose autodiff is the expected derivative.
    - `expected_tangent`: or the derivative itself, `(primals, tangents) -> tangent_out`, with
        a tuple for each.
    - `expected_cotangent`: or `(primals, cotangent) -> tuple of cotangents`.
    - `nonlinear`: the backward rule is not linear in the cotangent (clipping), and is
        meant so. Skips `adjoint`, the half of `linear` about cotangents and, without a
        `reference`, `order`.
    - `nondifferentiable`: names of positional parameters that are not to be perturbed.
    - `tangents`, `cotangents`: further directions, trees like `args` and like the output.
    - `order`: the highest order of derivatives to check.
    - `at`: edge points for `finite`, each a tuple of arguments.
    - `max_residual_bytes`: fail if more is kept for one backward pass.
    - `tolerance`: the relative error that passes, instead of 1e-5 in float64 (1e-7 for
        float64 arguments) and what rounding explains elsewhere. For functions that are
        themselves approximate, such as iterative solvers.
    - `seed`: of the random directions. With several, `range(20)` for one, the checks
        of numbers are run along each; what depends on no direction is checked once.
    - `raises`: whether to raise when a check fails.

    **Returns:**

    A [`eqx_grads.testing.Report`][].

    **Raises:**

    [`eqx_grads.testing.RuleCheckError`][], an `AssertionError` with the report; an
    `eqx_grads.RuleError` for options that make no sense.
    """
    names = _chosen(checks, skip)
    options = Options(
        reference=reference,
        expected_tangent=expected_tangent,
        expected_cotangent=expected_cotangent,
        nonlinear=nonlinear,
        nondifferentiable=nondifferentiable,
        tangents=tangents,
        cotangents=cotangents,
        order=order,
        at=at,
        max_residual_bytes=max_residual_bytes,
        tolerance=tolerance,
    )
    seeds = [seed] if isinstance(seed, int) else list(seed)
    case = Case(fn, args, kwargs, options)
    if not case.subject.leaves:
        raise rule_error(
            f"`{case.subject.name}` was given nothing that can be differentiated.",
            f"its positional arguments are {len(case.subject.args)} without inexact leaves",
            do="Pass floating-point arrays by position.",
        )
    findings: list[Finding] = []
    for number, each in enumerate(seeds):
        case.reseed(each)
        for name in names:
            if number == 0 or name in _DIRECTED:
                findings += _run(name, case)
    numbers = {"seed": seed, "leaves": case.names}
    report = Report(case.subject.name, findings, numbers)
    if raises:
        report.raise_if_failed()
    return report


# The checks that look along random directions, and compile nothing new for another one.
_DIRECTED = ("forward", "reverse", "adjoint", "linear", "order")
# Where an exception arises that no part of a check has met.
_WHERE = {"forward": "the tangents", "reverse": "the cotangents"}


def _run(name: str, case: Case) -> list[Finding]:
    findings: list[Finding] = []
    try:
        for finding in CHECKS[name](case):
            findings.append(finding)
    except Exception as e:
        findings.append(broke(name, _WHERE.get(name, "the whole check"), e))
    if any(finding.verdict == FAILED for finding in findings):
        case.failed.add(name)
    return findings or [skipped(name, "nothing to check")]


def _chosen(checks: Collection[str] | None, skip: Collection[str]) -> Sequence[str]:
    as_names = lambda names: (names,) if isinstance(names, str) else tuple(names)
    wanted = tuple(CHECKS) if checks is None else as_names(checks)
    for name in (*wanted, *as_names(skip)):
        if name not in CHECKS:
            raise rule_error(
                f"There is no check `{name}`.",
                f"there are {', '.join(f'`{check}`' for check in CHECKS)}",
                do="Choose among these in `checks=` and `skip=`.",
            )
    return [name for name in CHECKS if name in wanted and name not in as_names(skip)]
