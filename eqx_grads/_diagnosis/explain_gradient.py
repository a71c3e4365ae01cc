"""`explain_gradient`: what is wrong with the gradient of a loss, by one call."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._zero_safe.zero_safe import ZeroSafe
from ._zero.explain_zero import explain_traced
from .gradient import change_along, directions, kink, rounding_of, trace_gradient
from .parameters import no_parameters, remark_on
from .progress import diagnosing
from .report import (
    AbstractRecord,
    AbstractReport,
    cells,
    COLUMNS,
    rows_by_leaf,
    Table,
    with_detail,
)
from .traced_loss import TracedLoss


# Relative to the weights of the layer, and relative to the gradient of another layer.
_EXPLODING, _VANISHING = 1e4, 1e-6
_WHERE = "`eqg.gradient_flow(loss, model, *args)` says where."
# What to do about each kind.
_CURES = {
    "no reverse mode": "For a `while_loop`, use `eqg.filter_while_loop` with `max_steps`; for "
    "a solver, `eqg.implicit`.",
    "not finite": "No single operation was found that makes it so. The notes say more.",
    "rounding noise": "If a normalization after it cancels what it changes, remove the leaf. "
    "Otherwise, an operation loses all digits, as `eigh` does for equal eigenvalues.",
    "exploding": "Apply `eqg.clip_gradient_norm(x, 1.0)` where the gradient grows, such as to "
    f"the carry of a loop, or scale the loss down. {_WHERE}",
    "vanishing": "Normalize, add residual connections, or initialize with larger weights. "
    f"{_WHERE}",
    "kink": "Start elsewhere, or use a smooth function.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symptom(AbstractRecord):
    """Something that is wrong with a gradient.

    It has the fields of all records. The kinds are `"not finite"`, `"zero"`,
    `"rounding noise"`, `"exploding"`, `"vanishing"`, `"no array"`, `"kink"` and
    `"no reverse mode"`. Also:

    - `detail`: the kind that the tool for this symptom reports, or the slopes at a kink.
    """

    detail: str = ""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SymptomReport(AbstractReport):
    """The symptoms of a gradient. False without symptoms.

    - `found`: a [`eqx_grads.Symptom`][] for each place and leaf, the most urgent first.
    - `loss`: the value of the loss.
    - `norms`: the norm of the gradient by layer.
    - `remarks`: further notes.
    """

    found: Sequence[Symptom]
    loss: float
    norms: dict[str, float]
    remarks: Sequence[str] = ()

    @property
    def headline(self) -> str:
        if not self.found:
            but = ", but see the note" * bool(self.remarks)
            return f"Nothing is wrong with the gradient{but}. The loss is {self.loss:.4g}."
        kinds = dict.fromkeys(symptom.kind for symptom in self.found)
        return f"What may keep the model from learning: {', '.join(kinds)}."

    def tables(self):
        rows = rows_by_leaf(cells(s, kind=with_detail(s)) for s in self.found)
        says_all = any(s.kind in ("not finite", "zero") for s in self.found)
        norms = () if says_all else [(x, f"{norm:.2g}") for x, norm in self.norms.items()]
        return [Table(COLUMNS, rows), Table(("layer", "gradient norm"), norms, source="norms")]

    def notes(self):
        # One thing to do about each kind: what the first one says.
        return list({s.kind: s.cure for s in reversed(self.found)}.items())[::-1]


@diagnosing("explain_gradient")
def explain_gradient(
    loss: Callable[..., Any], model: PyTree, *args: Any, **kwargs: Any
) -> SymptomReport:
    r"""Say what is wrong with the gradient of a loss, or how large it is by layer.

    Call it first if a model does not learn.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        class Quantized(eqx.Module):
            linear: eqx.nn.Linear
            scale: float = 0.5

            def __call__(self, x):
                return self.scale * jnp.round(self.linear(x))

        model = Quantized(eqx.nn.Linear(3, 4, key=jax.random.key(0)))
        loss = lambda model, x: jnp.sum((model(x) - 1.0) ** 2)

        report = eqg.explain_gradient(loss, model, jnp.ones(3))
        for symptom in report.found:
            print(symptom.leaf, symptom.kind, symptom.detail, sep=" | ")
        ```

        ```text
        linear.weight | zero | rounding
        linear.bias | zero | rounding
        scale | no array | the Python number 0.5
        ```

    **Arguments:**

    - `loss`: called as `loss(model, *args, **kwargs)`. Returns a real scalar.
    - `model`: any PyTree. The gradient is with respect to its inexact arrays.
    - `*args`, `**kwargs`: anything.

    **Returns:**

    A [`eqx_grads.SymptomReport`][], which is false if nothing is wrong. `print` shows it. It
    looks for

    - a loss or a gradient that is not finite: the first row of [`eqx_grads.explain_nan`][];
    - a loss without a gradient in reverse mode, as of a `while_loop`;
    - a gradient that is zero, or a rounding error: the rows of [`eqx_grads.explain_zero`][];
    - a gradient that is $10^4$ times as large as the weights of its layer, or a millionth of
        the gradient of another layer;
    - a Python float in a field of your own classes, or in a layer instead of an array: a Python
        float has no gradient. A remark names integers and `None`;
    - a kink at this point along a random direction. If the gradient is zero at a kink or on a
        staircase, a remark says so.

    The loss and its gradient are compiled once. If nothing is wrong, that is all.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar or can't be traced, or if the
    model has no inexact arrays. Also if JAX can't differentiate an operation, or the loss
    raises an error that no NaN explains.
    """
    below = loss.__wrapped__ if isinstance(loss, ZeroSafe) else loss
    traced, gradient, error = trace_gradient("explain_gradient", below, model, args, kwargs)
    found: list[Symptom] = []
    raises = isinstance(error, jax.errors.JaxRuntimeError)  # of a check, as a solver has
    parts = [] if gradient is None else [gradient.loss, *gradient.gradients]
    if raises or not all(np.all(np.isfinite(x)) for x in parts):
        from ._nan.explain_nan import explain_nan  # not at the top: it takes time to load

        report = explain_nan(loss, model, *args, **kwargs)
        found += [_symptom(record, "not finite") for record in report.found[:1]]
        if report and not found:
            found.append(_own("not finite"))
        if not report:  # as `zero_safe` drops what is not finite
            _, gradient, error = trace_gradient("explain_gradient", loss, model, args, kwargs)
        if raises or (report and not report.found):
            return SymptomReport(found, report.loss, {}, report.remarks)
    zero = explain_traced(below, traced, gradient, error)
    assert gradient is not None
    found += [] if gradient.error is None else [_own("no reverse mode")]
    found += [_symptom(record, "zero") for record in zero.found]
    found += [_own("rounding noise", leaf) for leaf in zero.noise]
    parts, is_number = no_parameters(model), lambda x: isinstance(x.value, float)
    for x in filter(is_number, parts):
        at = {"file": x.file, "line": x.line, "cure": x.cure}
        found.append(Symptom(kind="no array", leaf=x.path, detail=x.what, **at))
    norms = _norms(traced, gradient.gradients)
    if not {symptom.kind for symptom in found} & {"not finite", "rounding noise"}:
        found += _sizes(traced, norms)
        along = {} if zero.found else dict(enumerate(directions(traced)))
        change = change_along(traced, gradient, along)
        if sides := kink(change, rounding_of(traced, gradient)):
            found.append(_own("kink", detail=f"along a random direction, the slope is {sides}"))
    remarks = [*zero.remarks, *remark_on([x for x in parts if not is_number(x)])]
    return SymptomReport(found, gradient.loss, norms, remarks)


def _symptom(record: Any, kind: str) -> Symptom:
    shared = {f.name: getattr(record, f.name) for f in dataclasses.fields(AbstractRecord)}
    return Symptom(**{**shared, "kind": kind}, detail=record.kind)


def _own(kind: str, leaf: str = "", detail: str = "") -> Symptom:
    return Symptom(kind=kind, leaf=leaf, detail=detail, cure=_CURES.get(kind, ""))


def _layer_of(leaf: str) -> str:
    """The path without its last part."""
    return re.sub(r"\.?[^.\[\]]+$|\[[^\[\]]*\]$", "", leaf) or leaf


def _norms(traced: TracedLoss, arrays: Sequence[Any]) -> dict[str, float]:
    norms: dict[str, float] = {}
    for leaf, x in zip(traced.leaves, arrays, strict=False):
        layer = _layer_of(leaf)
        size = np.abs(np.asarray(x)).astype(np.float64).ravel()
        # A square may overflow. Without BLAS, which starts its threads: that takes longer.
        norms[layer] = float(np.hypot.reduce(size, initial=norms.get(layer, 0.0)))
    return norms


def _sizes(traced: TracedLoss, norms: dict[str, float]) -> list[Symptom]:
    """The layers whose gradient is too large or too small."""
    weights = _norms(traced, traced.values[: len(traced.leaves)])
    largest = max(norms.values(), default=0.0)
    explodes = [x for x, norm in norms.items() if norm > _EXPLODING * max(1.0, weights[x])]
    vanishes = [x for x, norm in norms.items() if 0 < norm < _VANISHING * largest]
    return [
        *(_own("exploding", layer) for layer in explodes),
        *(_own("vanishing", layer) for layer in vanishes if layer not in explodes),
    ]
