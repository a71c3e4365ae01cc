"""The values that a loss keeps for its backward pass, and the equations that compute them.

The pullback that `jax.vjp` returns is a PyTree whose leaves are the residuals. So they are the
outputs of a program, the forward pass. It is evaluated with a `Source` for each value: the
equation that computes it, and its equations in the bodies of the loops that stack it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ..._errors import first_line, rule_error, RuleError
from ..._jaxprs.dependence import free_variables, without_unused
from ..._jaxprs.evaluate import evaluate
from ..._jaxprs.structure import Call, CallWithRule, Checkpoint, Scan, structure
from ..origins import Origin
from ..report import AbstractRecord
from ..source_lines import function_file, is_users_file, rule_line, UNKNOWN
from ..traced_loss import TracedLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(AbstractRecord):
    """An array that is kept from the forward to the backward pass.

    It has the fields of all records; `step` is empty. The kinds are `"computed"`, `"carry"`,
    `"rule"`, `"constant"` and `"input"`. Also:

    - `shape`, `dtype`: the shape and dtype for one step, if a loop keeps a value for each step.
    - `n_steps`: how many are kept: the product of the lengths of all enclosing loops.
    - `bytes`: of all steps.
    """

    shape: tuple[int, ...]
    dtype: str
    n_steps: int
    bytes: int

    @property
    def bytes_per_step(self) -> int:
        return self.bytes // max(self.n_steps, 1)


def bytes_of(aval: Any) -> int:
    """The size of an array. A token of effects has no size."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(getattr(aval, "shape", ())) * itemsize


@dataclasses.dataclass(eq=False)
class Made:
    """An array that the forward pass makes: its kind, as in `Residual`, and the equation of the
    loss that makes it, if it is known."""

    aval: Any
    kind: str
    name: str
    origin: Origin | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """A value: an array, or a stack with an array for each step of some loops.

    - `loops`: the numbers of the loop equations in the loss, outermost first; `None`
        for a loop that is not in the loss. `steps`: the product of their lengths.
    - `kept_by_loop`: an output of a loop that is only there for the backward pass.
    """

    made: Made
    loops: tuple[int | None, ...] = ()
    steps: int = 1
    kept_by_loop: bool = False

    @property
    def bytes(self) -> int:
        return self.steps * bytes_of(self.made.aval)

    def record(self, leaf: str) -> Residual:
        """- `leaf`: the path of an input of the loss in the model, or empty."""
        made, origin = self.made, self.made.origin
        has_rule = origin is not None and isinstance(structure(origin.eqn), CallWithRule)
        return Residual(
            **(UNKNOWN if origin is None else origin.source).fields(),
            kind="rule" if has_rule and made.kind == "computed" else made.kind,
            leaf=leaf,
            primitive=made.name if origin is None else origin.primitive,
            path="" if origin is None else origin.path,
            shape=tuple(made.aval.shape),
            dtype=str(made.aval.dtype),
            n_steps=self.steps,
            bytes=self.bytes,
        )


def _in_function(origin: Origin | None, eqn: Any) -> Origin | None:
    """The origin; for a rule of this library that calls the user's function, such as the step
    of a `filter_scan`, with the line in this function."""
    known = origin and structure(origin.eqn)
    if origin and isinstance(known, CallWithRule):
        is_ours = not is_users_file(function_file(*known.programs))
        if is_ours and (line := rule_line(eqn)).file:
            return dataclasses.replace(origin, source=line, primitive=eqn.primitive.name)
    return origin


_USE_SCAN = (
    "Only reverse mode keeps anything for a backward pass. A `while_loop` has no reverse "
    "mode: use a `scan`, or `eqg.filter_while_loop` with `max_steps`. If `jax.grad` of the "
    "loss raises the error too, fix it first."
)
_NO_COPY = ("reshape", "squeeze", "expand_dims")


class Gradient:
    """The gradient of a loss as a program. `sources` are the residuals in it, each once.

    - `loss`: a function of the inputs of the traced program.
    - `origin_of`: where an equation of the gradient comes from.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        traced: TracedLoss,
        origin_of: Callable[[Any], Origin | None] = lambda eqn: None,
    ):
        self._origin_of = origin_of
        n = len(traced.leaves)

        def gradient(arrays, others):
            value, pullback = jax.vjp(lambda *arrays: loss(*arrays, *others), *arrays)
            value = jax.lax.optimization_barrier(value)  # what follows is the backward pass
            return jax.tree.leaves(pullback), (value, pullback(jnp.ones_like(value)))

        trace = jax.make_jaxpr(gradient, return_shape=True)
        try:
            program, out = trace(traced.values[:n], traced.values[n:])
        except RuleError:
            raise  # it says what to do
        except (ValueError, NotImplementedError) as error:
            what = "The loss has no derivative in reverse mode."
            raise rule_error(what, first_line(error), do=_USE_SCAN) from error
        n_residuals = len(out[0])
        n_others = len(program.out_avals) - n_residuals
        # The program without the equations that only return the residuals.
        needed = without_unused(program, [False] * n_residuals + [True] * n_others)
        value, *gradients = needed.jaxpr.outvars
        start = next(i for i, eqn in enumerate(needed.eqns) if value in eqn.outvars)
        # A pullback may hold what a compiled gradient does not need, such as the arguments of
        # a call with a rule.
        used = set(free_variables(needed.eqns[start + 1 :], gradients))
        types = zip(program.in_avals, traced.inputs, strict=True)
        inputs = [Source(Made(aval, "input", name)) for aval, name in types]
        outs = zip(program.jaxpr.outvars, self._sources(program, inputs), strict=True)
        kept = [
            s for v, s in list(outs)[:n_residuals] if not isinstance(v, Literal) and v in used
        ]
        self.sources = list({(s.made, s.steps): s for s in reversed(kept)}.values())[::-1]
        self.total = sum(s.bytes for s in self.sources if s.made.kind != "input")

    def _sources(
        self, program: ClosedJaxpr, inputs: Sequence[Source], around: Origin | None = None
    ) -> list[Source]:
        """The sources of the outputs of a program. `around`: the equation that it is in."""

        def hook(eqn, values):
            name = eqn.primitive.name
            origin = _in_function(self._origin_of(eqn) or around, eqn)
            if name in _NO_COPY and values[0].made.kind == "input":
                return values[:1]  # takes no new memory
            made = [Made(v.aval, "computed", name, origin) for v in eqn.outvars]
            match structure(eqn):
                case Call() | Checkpoint() as call:
                    return self._sources(*call.programs, values, origin)
                case Scan() as scan:
                    return self._sources_of_scan(eqn, scan, made, origin)
            return list(map(Source, made))

        constant = lambda x: Source(Made(jax.typeof(x), "constant", "constant"))
        return evaluate(program, inputs, hook, constant=constant)

    def _sources_of_scan(self, eqn, scan, made, origin) -> list[Source]:
        (body,) = scan.programs
        inside = [
            Made(v.aval, "computed", eqn.primitive.name, origin) for v in body.jaxpr.invars
        ]
        carry = inside[scan.n_consts : scan.n_consts + scan.n_carry]
        outs = self._sources(body, list(map(Source, inside)), origin)
        # The carry before each step is named after the equation that computes the next one.
        for before, last, after in zip(carry, made, outs, strict=False):
            before.kind = "carry"
            before.origin = last.origin = after.made.origin or origin
        # A loop in a rule is not one of the loss, and all that it stacks is for the derivative.
        loop = self._origin_of(eqn)
        if loop is not None and not isinstance(structure(loop.eqn), Scan):
            loop = None
        number = None if loop is None else loop.number
        n_outputs = 0 if loop is None else len(loop.eqn.outvars)
        stacks = [
            Source(
                s.made,
                (number, *s.loops),
                s.steps * scan.length,
                s.kept_by_loop or index >= n_outputs,
            )
            for index, s in enumerate(outs)
        ]
        return [*map(Source, made[: scan.n_carry]), *stacks[scan.n_carry :]]
