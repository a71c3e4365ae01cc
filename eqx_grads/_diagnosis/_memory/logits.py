"""The logits of a cross-entropy with integer labels, and a traced loss without them.

`losses.linear_cross_entropy` takes the inputs and the weight of the layer that computes the
logits. In the traced program, its mean stands for what is computed of the logits of each token.
So the values differ, and the memory is that of the loss with this function.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ..._jaxprs.dependence import variables
from ..._jaxprs.evaluate import bind, enter, evaluate
from ..._jaxprs.structure import Call, equations, inner_programs, structure
from ..._jaxprs.versions import assigns_shardings
from ...losses import linear_cross_entropy
from ..traced_loss import TracedLoss


# What a cross-entropy is made of. With others, such as `tanh` and `dot_general`, it is another
# loss than `linear_cross_entropy`. Labels are indices, or numbers of which one is one; of a
# text, the last logits have no label.
_ALLOWED = frozenset(
    """
    abs add broadcast_in_dim convert_element_type copy div eq exp gather ge gt is_finite log lt
    max ne neg reduce_max reduce_sum reshape select_n sign slice squeeze stop_gradient sub
    transpose
    """.split()  # noqa: SIM905
)
_REQUIRED = frozenset(["exp", "log", "reduce_sum"])
_LEAST_SHARE = 0.5  # of the logits that have a label


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of a loss.

    - `product`: the equation that multiplies the inputs of the last layer, operand `inputs`, by
        its weight. `users`: the equations that use an array of the size of the logits.
    - `outputs`: the variables, of one number for each token, that the loss is computed from.
    - `tokens`, `vocabulary`: the numbers of these. `labels`: the number of tokens that the loss
        is computed from.
    - `weight`: the weight of shape `(vocabulary, features)`, as it is in the arguments of the
        loss; `weight` if it is none of these.
    """

    product: Any
    inputs: int
    users: Sequence[Any]
    outputs: Sequence[Any]
    tokens: int
    vocabulary: int
    labels: int
    weight: str

    @property
    def bytes(self) -> int:
        return self.tokens * self.vocabulary * self.product.outvars[0].aval.dtype.itemsize

    @property
    def has_bias(self) -> bool:
        """Whether something is added to the product that is equal for all tokens."""
        return any(
            v.aval.size == self.vocabulary
            for eqn in self.users
            if eqn.primitive.name == "add"
            for v in eqn.invars
        )

    @property
    def call(self) -> str:
        """What to write."""
        bias = ", bias=bias" * self.has_bias
        return f"`eqg.losses.linear_cross_entropy(x, {self.weight}, labels{bias})`"


def logits_of(program: ClosedJaxpr, names: Mapping[Any, str]) -> Iterator[Logits]:
    """The logits in a program and in the functions that it calls, outside of loops.

    - `names`: those of its inputs, as far as they are arguments of the loss.
    """
    known = dict(names)
    for i, eqn in enumerate(program.eqns):
        if eqn.primitive.name == "transpose" and eqn.invars[0] in known:
            known[eqn.outvars[0]] = _transposed(known[eqn.invars[0]])
        elif eqn.primitive.name == "dot_general":
            found = _logits_from(eqn, program.eqns[i + 1 :], program.jaxpr.outvars, known)
            if found is not None:
                yield found
        elif _is_entered(eqn):
            (inner,) = inner_programs(eqn)
            pairs = zip(inner.jaxpr.invars, eqn.invars, strict=True)
            inside = {v: known[x] for v, x in pairs if variables([x]) and x in known}
            yield from logits_of(inner, inside)


def _transposed(name: str) -> str:
    return name.removesuffix(".T") if name.endswith(".T") else f"{name}.T"


def without_logits(traced: TracedLoss, logits: Logits) -> Callable[..., Any]:
    """The loss by `linear_cross_entropy`, as a function of the inputs of the traced program."""
    return lambda *values: _evaluate(traced.program, list(values), logits)[0]


def _is_entered(eqn: Any) -> bool:
    return isinstance(structure(eqn), Call) and not assigns_shardings(eqn.params)


def _logits_from(
    product: Any, eqns: Sequence[Any], outputs: Sequence[Any], names: Mapping[Any, str]
) -> Logits | None:
    (contracted, batch), free = product.params["dimension_numbers"], _free_sizes(product)
    (result,) = product.outvars
    if any(batch) or min(free) < 2:
        return None
    smallest, one_hot = result.aval.size, set()
    large, follows, users = {result}, {result}, []
    for eqn in eqns:
        ins = set(variables(eqn.invars))
        if not ins & follows:
            if _is_one_hot(eqn, one_hot):
                one_hot.update(eqn.outvars)
            continue
        follows.update(eqn.outvars)
        if ins & large:
            users.append(eqn)
            if eqn.primitive.name == "slice":
                size = eqn.outvars[0].aval.size
                smallest = size if size >= _LEAST_SHARE * result.aval.size else smallest
        large.update(v for v in eqn.outvars if v.aval.size >= smallest)
    if large & set(variables(outputs)):
        return None
    of_label = [eqn for eqn in users if _is_product_with(one_hot, eqn)]
    primitives = {
        e.primitive.name for u in users if u not in of_label for e in _leaf_equations(u)
    }
    # Exponentials of logits are divided by their sum, or the logarithm of this sum is used.
    of_tokens = [e for e in eqns if set(variables(e.invars)) & follows and e not in users]
    primitives_after = primitives | {e.primitive.name for e in of_tokens}
    if not primitives <= _ALLOWED or not primitives_after >= _REQUIRED:
        return None
    if not of_label and "gather" not in primitives:
        return None
    small = [v for eqn in users for v in eqn.outvars if v not in large]
    labels = {v.aval.size for v in small}
    inputs = [
        i for i in (0, 1) if smallest % free[1 - i] == 0 and labels == {smallest // free[1 - i]}
    ]
    if not inputs:
        return None
    [i, *_] = inputs
    weight = names.get(product.invars[1 - i], "weight")
    if contracted[1 - i] == (0,):
        weight = _transposed(weight)
    return Logits(product, i, users, small, free[i], free[1 - i], labels.pop(), weight)


def _is_one_hot(eqn: Any, one_hot: set[Any]) -> bool:
    """Whether its outputs are comparisons of integers, as numbers, for each token and word."""
    known = lambda v: not isinstance(v, Literal) and v in one_hot
    if any(jnp.issubdtype(v.aval.dtype, jnp.inexact) and not known(v) for v in eqn.invars):
        return False
    compares = any(e.primitive.name == "eq" for e in _leaf_equations(eqn))
    return compares or bool(one_hot & set(variables(eqn.invars)))


def _is_product_with(one_hot: set[Any], eqn: Any) -> bool:
    return eqn.primitive.name == "mul" and bool(one_hot & set(variables(eqn.invars)))


def _free_sizes(product: Any) -> list[int]:
    """For each operand, the product of the sizes of the axes that are not contracted."""
    contracted = product.params["dimension_numbers"][0]
    return [
        math.prod(n for i, n in enumerate(v.aval.shape) if i not in axes)
        for v, axes in zip(product.invars, contracted, strict=True)
    ]


def _leaf_equations(eqn: Any) -> list[Any]:
    inner = inner_programs(eqn)
    return [e for p in inner for e in equations(p) if not inner_programs(e)] if inner else [eqn]


def _evaluate(program: ClosedJaxpr, values: Sequence[Any], logits: Logits) -> list[Any]:
    loss: list[Any] = []

    def hook(eqn, values):
        if eqn is logits.product:
            loss.append(_mean_loss(logits, values))
        if _is_entered(eqn) and any(
            e is logits.product for p in inner_programs(eqn) for e in equations(p)
        ):
            return enter(eqn, values, lambda program, xs, _: _evaluate(program, xs, logits))
        outs = bind(eqn, values)
        return [
            jnp.broadcast_to(loss[0], out.shape).astype(out.dtype) if v in outputs else out
            for v, out in zip(eqn.outvars, outs, strict=True)
        ]

    outputs = set(logits.outputs)
    return evaluate(program, values, hook)


def _mean_loss(logits: Logits, values: Sequence[Any]) -> jax.Array:
    matrices = []
    for x, axes in zip(values, logits.product.params["dimension_numbers"][0], strict=True):
        last = range(x.ndim - len(axes), x.ndim)
        features = math.prod(x.shape[i] for i in axes)
        matrices.append(jnp.moveaxis(x, axes, last).reshape(-1, features))
    x, weight = matrices[logits.inputs], matrices[1 - logits.inputs]
    # The memory does not depend on the labels, nor on which tokens have one.
    return linear_cross_entropy(x[: logits.labels], weight, jnp.zeros(logits.labels, int))
