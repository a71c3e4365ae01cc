"""`explain_gradient`: what is wrong with the gradient of a loss, by one call."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._zero_safe.zero_safe import ZeroSafe
from ._nan.explain_nan import explain_nan
from ._zero.explain_zero import explain_traced
from ._zero.gradient import directions, Gradient, try_gradient
from .nan_checks import without_nan_checks
from .parameters import no_parameters
from .progress import doing, showing_progress
from .report import AbstractRecord, AbstractReport, cells, COLUMNS, count, cures_of, Table
from .traced_loss import check_no_references, trace_loss, TracedLoss


# Relative to the weights of the layer, and relative to the gradient of another layer.
_EXPLODING, _VANISHING = 1e4, 1e-6
# The first is the smallest. For float32, its slopes are exact to a thousandth.
_KINK_STEPS = (2.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symptom(AbstractRecord):
    """Something that is wrong with a gradient.

    It has the fields of all records. The kinds are `"not finite"`, `"zero"`,
    `"rounding noise"`, `"exploding"`, `"vanishing"`, `"no array"` and `"kink"`. Also:

    - `detail`: the kind that the tool for this symptom finds.
    - `elsewhere`: what the loss does next to the point, at a kink or a staircase.
    - `tool`: the call that says more, or empty.
    """

    detail: str = ""
    elsewhere: str = ""
    tool: str = ""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class SymptomReport(AbstractReport):
    """The symptoms of a gradient. False if there are none.

    - `found`: a [`eqx_grads.Symptom`][] for each place and leaf, the most urgent first.
    - `loss`: the value of the loss.
    - `norms`: the norm of the gradient by layer.
    - `remarks`: what else there is to know.
    """

    found: Sequence[Symptom]
    loss: float
    norms: dict[str, float]
    remarks: Sequence[str] = ()

    @property
    def headline(self) -> str:
        kinds = list(dict.fromkeys(symptom.kind for symptom in self.found))
        if not kinds:
            return f"Nothing is wrong with the gradient. The loss is {self.loss:.4g}."
        found = count(len(kinds), "thing is", "things are")
        return f"{found} wrong with the gradient: {', '.join(kinds)}."

    def tables(self):
        rows: dict[Any, list[Symptom]] = {}
        for symptom in self.found:
            rows.setdefault(dataclasses.replace(symptom, leaf="", elsewhere=""), []).append(
                symptom
            )
        shown = [
            cells(
                group[0],
                leaf=", ".join(symptom.leaf for symptom in group[:3])
                + f" and {len(group) - 3} more" * (len(group) > 3),
                kind=": ".join(filter(None, [group[0].kind, group[0].detail])),
            )
            for group in rows.values()
        ]
        norms = [(path, f"{norm:.2g}") for path, norm in self.norms.items()]
        return [Table(COLUMNS, shown), Table(("layer", "gradient norm"), norms, source="norms")]

    def notes(self):
        tools = dict.fromkeys(f"`{s.tool}`" for s in self.found if s.tool)
        elsewhere = [(s.leaf, s.elsewhere) for s in self.found if s.elsewhere]
        more = [("more", f"{' and '.join(tools)}.")] if tools else []
        return [*cures_of(self.found), *elsewhere[:1], *more]


@showing_progress("explain_gradient")
@without_nan_checks()
def explain_gradient(
    loss: Callable[..., Any], model: PyTree, *args: Any, **kwargs: Any
) -> SymptomReport:
    r"""Say what is wrong with the gradient of a loss, or how large it is by layer.

    Call it first if a model does not learn. It names the tool that says more.

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
    - a gradient that is zero, or a rounding error: the rows of [`eqx_grads.explain_zero`][];
    - a gradient that is $10^4$ times as large as the weights of its layer, or a millionth of
        the gradient of another layer;
    - a Python float in a field of your own classes, which is no array and has no gradient;
    - a kink of the loss at this point.

    The loss and its gradient are compiled once. If nothing is wrong, that is all.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar or can't be traced, if the model
    has no inexact arrays, if JAX can't differentiate an operation, or if the loss raises an
    error that no NaN explains.
    """
    below = loss.__wrapped__ if isinstance(loss, ZeroSafe) else loss
    doing("tracing the loss")
    traced = trace_loss("explain_gradient", below, model, args, kwargs)
    check_no_references("explain_gradient", below, traced.program)
    doing("compiling the gradient")
    gradient, error = try_gradient(traced)
    found: list[Symptom] = []
    raises = isinstance(error, jax.errors.JaxRuntimeError)  # of a check, as a solver has
    parts = [] if gradient is None else [gradient.loss, *gradient.gradients]
    if raises or not all(np.all(np.isfinite(x)) for x in parts):
        report = explain_nan(loss, model, *args, **kwargs)
        call = "eqg.explain_nan(loss, model, *args)"
        found += [_symptom(record, "not finite", call) for record in report.found[:1]]
        if raises:
            return SymptomReport(found, report.loss, {}, report.remarks)
    zero = explain_traced(below, traced, gradient, error)
    call = "eqg.explain_zero(loss, model, *args)"
    found += [_symptom(record, "zero", call) for record in zero.found]
    found += [
        Symptom(kind="rounding noise", leaf=leaf, cure=_NOISE, tool=call) for leaf in zero.noise
    ]
    found += [
        Symptom(
            kind="no array",
            leaf=one.path,
            detail=one.what,
            file=one.file,
            line=one.line,
            cure=f"It has no gradient. To train it, make it an array: `{one.code}`.",
        )
        for one in no_parameters(model)
        if isinstance(one.value, float)
    ]
    norms: dict[str, float] = {}
    if gradient is not None:
        norms = _norms(traced, gradient.gradients)
        if not any(symptom.kind in ("not finite", "rounding noise") for symptom in found):
            found += _sizes(traced, norms)
            found += [] if zero.found else _kink(traced, gradient)
    loss_value = float("nan") if gradient is None else gradient.loss
    return SymptomReport(found, loss_value, norms, zero.remarks)


_NOISE = (
    "The loss does not depend on it: what follows, as a normalization, removes what it "
    "changes. Remove the leaf, or normalize over more than two elements."
)


def _symptom(record: Any, kind: str, tool: str) -> Symptom:
    shared = {f.name: getattr(record, f.name) for f in dataclasses.fields(AbstractRecord)}
    elsewhere = getattr(record, "elsewhere", "")
    shared |= {"kind": kind}
    return Symptom(**shared, detail=record.kind, elsewhere=elsewhere, tool=tool)


def _layer_of(leaf: str) -> str:
    """The path without its last part."""
    return re.sub(r"\.?[^.\[\]]+$|\[[^\[\]]*\]$", "", leaf) or leaf


def _norms(traced: TracedLoss, arrays: Sequence[Any]) -> dict[str, float]:
    norms: dict[str, float] = {}
    for leaf, x in zip(traced.leaves, arrays, strict=False):
        size = np.abs(np.asarray(x)).astype(np.float64)
        largest = float(np.max(size, initial=0.0))  # the squares may overflow
        is_scaled = 0 < largest < math.inf
        norm = largest * float(np.linalg.norm(size / largest)) if is_scaled else largest
        layer = _layer_of(leaf)
        norms[layer] = math.hypot(norms.get(layer, 0.0), norm)
    return norms


def _sizes(traced: TracedLoss, norms: dict[str, float]) -> list[Symptom]:
    """The layers whose gradient is too large or too small."""
    weights = _norms(traced, traced.values[: len(traced.leaves)])
    largest = max(norms.values(), default=0.0)
    call, found = "eqg.gradient_flow(loss, model, *args)", []
    for layer, norm in norms.items():
        if norm > _EXPLODING * max(1.0, weights[layer]):
            cure = (
                "Clip it with `eqg.clip_gradient_norm(x, 1.0)` where it grows, or scale down."
            )
            found.append(
                Symptom(kind="exploding", leaf=layer, path=layer, cure=cure, tool=call)
            )
        elif 0 < norm < _VANISHING * largest:
            cure = "Normalize, add residual connections, or initialize with larger weights."
            found.append(
                Symptom(kind="vanishing", leaf=layer, path=layer, cure=cure, tool=call)
            )
    return found


def _kink(traced: TracedLoss, gradient: Gradient) -> list[Symptom]:
    """A kink along a random direction: the slopes on its sides differ at any step."""
    if not gradient.can_move:
        return []
    n, along = len(traced.leaves), directions(traced)

    def loss_at(h):
        leaves = [
            (np.asarray(x) + h * d).astype(x.dtype)
            for x, d in zip(traced.values[:n], along, strict=True)
        ]
        return gradient.at([*leaves, *traced.values[n:]])[0]

    def slopes(h):
        return (loss_at(h) - gradient.loss) / h, (gradient.loss - loss_at(-h)) / h

    above, below = slopes(_KINK_STEPS[0])
    jump = above - below
    is_large = abs(jump) > 0.2 * max(abs(above), abs(below))
    # Of a loss in half precision, the slopes are rounding errors, and differ at each step.
    others = (np.subtract(*slopes(h)) for h in _KINK_STEPS[1:])
    if is_large and all(abs(other - jump) < 0.3 * abs(jump) for other in others):
        cure = (
            f"Along a random direction, the slope is {above:.3g} above and {below:.3g} "
            "below. Start elsewhere, or use a smooth function."
        )
        return [Symptom(kind="kink", cure=cure)]
    return []
