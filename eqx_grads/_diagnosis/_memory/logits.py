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
# What a mean over the tokens consists of, beside a division. With others, such as the product
# with a mask, the loss is another function of the losses of the tokens.
_OF_MEAN = frozenset(
    """
    abs add broadcast_in_dim convert_element_type copy is_finite log neg reduce_sum reshape
    select_n sign squeeze stop_gradient sub transpose
    """.split()  # noqa: SIM905
)
_TEMPERATURE = "t"


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of a loss.

    - `product`: the equation that multiplies the inputs of the last layer, operand `inputs`, by
        its weight. `users`: the equations that use an array of the size of the logits.
    - `outputs`: the variables, of one number for each token, that the loss is computed from.
    - `tokens`, `vocabulary`: the numbers of these. `labels`: the number of tokens that the loss
        is computed from.
    - `weight`: the weight of shape `(vocabulary, features)`, as it is in the arguments of the
        loss; `weight` if it is none of these. `bias`: likewise, or empty.
    - `is_mean`: whether the loss is the mean over the tokens. `has_temperature`: whether the
        logits are divided by a number.
    """

    product: Any
    inputs: int
    users: Sequence[Any]
    outputs: Sequence[Any]
    tokens: int
    vocabulary: int
    labels: int
    weight: str
    bias: str
    is_mean: bool
    has_temperature: bool

    @property
    def bytes(self) -> int:
        return self.tokens * self.vocabulary * self.product.outvars[0].aval.dtype.itemsize

    @property
    def cure(self) -> str:
        """What to write in place of the logits and their cross-entropy."""
        divided = f" / {_TEMPERATURE}" * self.has_temperature
        arguments = ["x", f"{self.weight}{divided}", "labels"]
        arguments += [f"bias={self.bias}{divided}"] if self.bias else []
        arguments += [] if self.is_mean else ['reduction="none"']
        which = f" for the {self.labels} labels" * (self.labels < self.tokens)
        text = (
            f"`eqg.losses.linear_cross_entropy({', '.join(arguments)})`, where `x` are the "
            f"inputs of the last layer{which}"
        )
        if self.has_temperature:
            text += f", and the logits are divided by `{_TEMPERATURE}`"
        if not self.is_mean:
            text += ". These are the losses of the tokens: compute the loss from them"
        return f"{text}. It never holds all {self.tokens} by {self.vocabulary} logits."


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
    n_labels, vocabulary = labels.pop(), free[1 - i]
    return Logits(
        product,
        i,
        users,
        small,
        free[i],
        vocabulary,
        n_labels,
        weight,
        _bias(eqns, users, vocabulary, names),
        _is_mean(eqns, users, small, n_labels),
        any(_is_division_by_number(eqn, large) for eqn in users),
    )


def _bias(eqns, users, vocabulary: int, names: Mapping[Any, str]) -> str:
    """What is added to the product that is equal for all tokens, or empty."""
    makers = {eqn.outvars[0]: eqn for eqn in eqns}
    for eqn in users:
        for v in variables(eqn.invars) if eqn.primitive.name == "add" else ():
            if v.aval.size == vocabulary:
                while v in makers and makers[v].primitive.name in _OF_LAYOUT:
                    v = makers[v].invars[0]
                return names.get(v, "bias")
    return ""


_OF_LAYOUT = ("broadcast_in_dim", "reshape", "convert_element_type")


def _is_division_by_number(eqn, large: set[Any]) -> bool:
    """Whether logits are divided by one number."""
    return (
        eqn.primitive.name == "div"
        and bool(large & set(variables(eqn.invars[:1])))
        and eqn.invars[1].aval.size == 1
    )


def _is_mean(eqns, users, of_tokens, n_labels: int) -> bool:
    """Whether only the mean of the losses of the tokens is used."""
    followed, constants = set(of_tokens), set()
    divisor, is_done = 1.0, False
    for eqn in eqns:
        ins = set(variables(eqn.invars))
        if not ins & followed:
            constants.update(eqn.outvars if ins <= constants else ())
            continue
        if eqn in users:
            continue
        # Nothing is added to the losses, and nothing else is computed of them.
        is_sum = eqn.primitive.name in ("add", "sub")
        n_literals = sum(isinstance(x, Literal) for x in eqn.invars)
        if is_done or not ins <= followed | constants or (is_sum and n_literals):
            return False
        factor = _divisor(eqn)
        if factor is None and not all(map(_is_of_mean, _leaf_equations(eqn))):
            return False
        divisor *= factor or 1.0
        is_done = divisor == n_labels and eqn.outvars[0].aval.size == 1
        followed.update(() if is_done else eqn.outvars)
    return is_done


def _is_of_mean(eqn) -> bool:
    name, (out,) = eqn.primitive.name, eqn.outvars
    if name == "gather":  # of the only element along an axis
        return out.aval.size == eqn.invars[0].aval.size
    if name == "max":  # that of an empty row
        return any(isinstance(v, Literal) and v.val == -math.inf for v in eqn.invars)
    is_of_floats = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars)
    return name in _OF_MEAN or not is_of_floats


def _divisor(eqn) -> float | None:
    """The constant that an equation divides by; `None` if it is no division by a constant."""
    numbers = [x.val for x in eqn.invars if isinstance(x, Literal)]
    if len(numbers) == 1 and eqn.primitive.name == "div" and isinstance(eqn.invars[1], Literal):
        return abs(float(numbers[0]))
    return None


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
