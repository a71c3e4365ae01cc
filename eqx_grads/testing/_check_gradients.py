"""`check_gradients`: the gradient of a whole model against finite differences."""

import functools as ft
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from jaxtyping import PyTree

from .._diagnosis.opaque import no_gradient
from .._diagnosis.progress import diagnosing, doing
from .._errors import bad_argument, check_flags, first_line, name_of, rule_error
from .._zero_safe.zero_safe import ZeroSafe
from ._compare import tolerance_in_float64
from ._gradient_faults import fault_of_value, faults_in_own_precision, faults_of_leaves
from ._gradient_report import GradientReport, LeafVerdict, RIGHT, SKIPPED, STOPPED, WRONG
from ._judge_leaf import Judge
from ._loss_program import CALLER, LossProgram, trace
from ._options import as_names, as_seed, check_tolerance
from ._outcome import outcome
from ._subject import is_part_of


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

_DROPPED = (
    "`zero_safe` drops the derivative of what a `where` does not take. On the boundary of a "
    "mask, such as at `x == 0`, the function may have another derivative: "
    "`eqg.explain_nan` of the function inside says what is dropped."
)


def check_gradients(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    order: int = 1,
    skip: Collection[str] = (),
    tolerance: float | None = None,
    seed: int = 0,
    raises: bool = True,
    **kwargs: Any,
) -> GradientReport:
    """Check the gradient of a whole model against finite differences, leaf by leaf.

    `check_rule` checks one function with a rule. This checks what a training step uses: the
    gradient of a loss, through all layers, scans and rules. It says which leaves are wrong, and
    names the function whose rule makes them wrong.

    - Gradient and loss are computed in float64. The gradient is compared with differences
        along a random direction of each leaf alone. So large weights do not hide a wrong bias.
    - Steps of several lengths are extrapolated (Richardson). Their disagreement is the error
        of the differences. A leaf whose differences prove nothing is `"not measured"`: the
        differences are too noisy, the slope still depends on the length of the shortest step,
        or the loss rounds to zero.
    - Forward mode, where it works, is compared with the differences too, and so with reverse
        mode (the adjoint identity).
    - Where the slopes on the two sides differ, the loss has a kink (`relu` at zero, ties of a
        maximum). The gradient must lie between them, and be right at a point nearby.
    - If the gradient is wrong, it is compared with differences that keep the results of each
        `stop_gradient` of the loss constant. A leaf that is right then is `"stopped"`.
    - For each wrong leaf, the rules in the program are removed (`eqg.custom_*`,
        `jax.custom_*`). If the gradient is right without some rules, the report names them,
        with the line and the layer of the call. If it is right at points nearby, the report
        names a tie: a comparison of equal numbers, or a `floor` of an integer.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import eqx_grads.testing as eqgt
        import jax
        import jax.numpy as jnp

        @eqg.custom_vjp
        def square(x):
            return x**2

        square.def_fwd(lambda x: (square(x), x))
        square.def_bwd(lambda x, ct: (x * ct,))  # and the factor 2?

        class Network(eqx.Module):
            encode: eqx.nn.Linear
            decode: eqx.nn.Linear

            def __call__(self, x):
                return self.decode(square(self.encode(x)))

        key1, key2 = jax.random.split(jax.random.key(0))
        network = Network(eqx.nn.Linear(3, 4, key=key1), eqx.nn.Linear(4, 1, key=key2))
        loss = lambda network, x: jnp.sum(network(x) ** 2)

        report = eqgt.check_gradients(loss, network, jnp.ones(3), raises=False)
        print([fault.leaf for fault in report.found])
        print(report.found[0].primitive)
        print(report["decode.weight"].verdict)
        ```

        ```text
        ['encode.weight', 'encode.bias']
        square
        right
        ```

    **Arguments:**

    - `loss`: called as `loss(model, *args, **kwargs)`. Returns a real scalar. Use
        `functools.partial` if it has a parameter with one of the names below.
    - `model`: any PyTree. Its inexact arrays are the leaves; integers, keys and `None` are not.
    - `*args`, `**kwargs`: anything.
    - `order`: 1, or 2 to check the second derivative: the product of the Hessian with a random
        direction, against differences of the gradient. Check the gradient itself first.
    - `skip`: the paths of leaves not to check, such as `"layers[0].weight"`; the path of a
        layer means all leaves in it, and `*` matches anything. For gradients that are
        deliberately not derivatives: leaves before a straight-through estimator or a
        surrogate.
    - `tolerance`: the largest relative error that passes, in addition to the estimated error
        of the differences. By default 1e-6, or what rounding explains in the dtype of a host
        function, or of the numbers in a half-precision program. Raise it for iterative
        solvers.
    - `seed`: the seed of the random directions.
    - `raises`: whether to raise when the gradient is wrong.

    **Returns:**

    A [`eqx_grads.testing.GradientReport`][], which is false if nothing is wrong.

    It compiles the loss, its gradient and its forward mode. It evaluates the loss about ten
    times for each leaf; a hundred times for a leaf that is wrong or badly conditioned. A loss
    of more than 1000 equations in a row is not compiled, and its gradient is not checked in the
    precision of the model.

    **Raises:**

    [`eqx_grads.testing.GradientCheckError`][], an `AssertionError` with the report.
    [`eqx_grads.RuleError`][] for a loss that is not a real scalar or can't be traced, and for a
    model without inexact arrays. It is also raised for an operation that JAX can't
    differentiate, and for options that make no sense.
    """
    check_flags(CALLER, raises=raises)
    check_tolerance(CALLER, tolerance)
    skip, seed = as_names(CALLER, "skip", skip), as_seed(CALLER, seed)
    if type(order) is not int or order not in (1, 2):
        do = "Use 1 for the gradient, or 2 for the second derivative."
        raise bad_argument(CALLER, "order", "1 or 2", order, do)
    with diagnosing(CALLER):
        again = ft.partial(trace, loss, model, args, kwargs, None if order == 1 else seed)
        report = _report(loss, again, skip, tolerance, seed, order)
    if raises:
        report.raise_if_failed()
    return report


def _report(loss, again, skip, tolerance, seed, order) -> GradientReport:
    title = f"{'slope of ' if order == 2 else ''}{name_of(loss)}"
    doing("tracing and compiling")
    program = again(steps_are_visible=False)
    kept = _kept(skip, program.names)
    modes, remarks = _modes(loss, program)
    low = program.rounded_to
    if tolerance is None:
        tolerance = tolerance_in_float64(low, program.lowest_of_user, 1e-6)
    numbers: dict[str, object] = {"seed": seed, "precision": str(low or "float64")}
    numbers["tolerance"] = tolerance
    if fault := fault_of_value(loss, program):
        leaves = [LeafVerdict(path) for path in program.names]
        return GradientReport(title, leaves, [fault], numbers, remarks)
    judge = Judge(program, tolerance, modes, seed)
    faults, lost = faults_in_own_precision(program, judge.gradient, kept)
    remarks += lost
    leaves = []
    for i, name in enumerate(program.names):
        doing("looking at leaf", i, len(program.names))
        known = SKIPPED if i not in kept else WRONG if i in faults else ""
        known = known or (RIGHT if judge.leaves[i].size == 0 else "")
        leaves.append(LeafVerdict(name, known) if known else judge.judge(i))
    doing("looking for the rules that are wrong")
    wrong = {i for i, leaf in enumerate(leaves) if leaf.verdict == WRONG}
    faults |= faults_of_leaves(judge, leaves, wrong - set(faults), again)
    if any(leaf.verdict == STOPPED for leaf in leaves):
        remarks.append(f"`stop_gradient` is called at {', '.join(program.stops[:4])}.")
    remarks += [_DROPPED] * (bool(faults) and isinstance(loss, ZeroSafe))
    numbers["evaluations"] = program.evaluations
    return GradientReport(title, leaves, [faults[i] for i in sorted(faults)], numbers, remarks)


def _kept(skip: Collection[str], names: Sequence[str]) -> set[int]:
    """The leaves that are not skipped."""
    kept = set(range(len(names)))
    for pattern in skip:
        glob = pattern.replace("[", "[[]")
        matches = lambda name, p=pattern, g=glob: is_part_of(name, p) or fnmatchcase(name, g)
        hits = {i for i, name in enumerate(names) if matches(name)}
        kept -= hits
        if not hits or not kept:
            what = f"names a leaf that the model does not have: `{pattern}`"
            raise rule_error(
                f"`skip` {'makes it skip all leaves' if hits else what}.",
                f"its leaves are {', '.join(names[:20])}",
                do="Name leaves by their paths, layers by the start of a path, or several with "
                "`*`.",
            )
    return kept


def _modes(loss, program: LossProgram) -> tuple[list[str], list[str]]:
    """The modes in which the loss can be differentiated, and remarks on the other modes:
    forward mode for a `jax.custom_vjp`, reverse mode for a `while_loop`."""
    zeros = [np.zeros_like(x) for x in program.leaves]
    modes, remarks = [], []
    for mode, run in (
        ("reverse", lambda: program.gradient),
        ("forward", lambda: program.tangent(program.leaves, zeros)),
    ):
        error = outcome(run)
        if not isinstance(error, Exception):
            modes.append(mode)
        elif f"{mode}-mode" in str(error).lower() and (modes or mode == "reverse"):
            remarks.append(f"There is no {mode} mode: {first_line(error)}")
        else:
            raise no_gradient(loss, program.traced, error) from error
    return modes, remarks
