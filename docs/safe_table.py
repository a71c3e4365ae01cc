"""Write the table of `docs/api/safe.md`: a function and its argument, JAX, ours, and the truth.

The truth is computed by mpmath, at many digits, where the derivative exists.

    python docs/safe_table.py
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import mpmath as mp
from eqx_grads import safe


sys.path.append(str(pathlib.Path(__file__).parents[1]))  # the tests are no package

from tests.mpmath_grid import partial


PAGE = pathlib.Path(__file__).parent / "api" / "safe.md"
START, END = "<!-- table: python docs/safe_table.py -->\n", "<!-- end of table -->\n"


class Row(NamedTuple):
    """A derivative of a function at a point; `order` has the times for each argument.

    - `truth`: in mpmath, or the limit from inside where the derivative is infinite.
    """

    name: str
    order: tuple[int, ...]
    point: tuple[float, ...]
    jax: Callable[..., Any]
    ours: Callable[..., Any]
    truth: Callable[..., Any] | str


def _masked(fn, otherwise):
    return lambda x: jnp.where(x > 0, fn(x), otherwise)


_HYPOT = (jnp.hypot, safe.hypot, lambda x, y: mp.sqrt(x * x + y * y))
_ARCTAN2 = (jnp.arctan2, safe.arctan2, mp.atan2)
_LOG_NDTR = (jsp.log_ndtr, safe.log_ndtr, lambda x: mp.log(mp.erfc(-x / mp.sqrt(2)) / 2))
_LOG_COSH = (
    lambda x: jnp.log(jnp.cosh(x)),
    safe.log_cosh,
    lambda x: mp.log1p(2 * mp.sinh(x / 2) ** 2),
)
_EXPM1 = (lambda x: jnp.expm1(x) / x, safe.expm1_ratio, lambda x: mp.expm1(x) / x if x else 1)
_LOG1P = (lambda x: jnp.log1p(x) / x, safe.log1p_ratio, lambda x: mp.log1p(x) / x if x else 1)
_SINHC = (lambda x: jnp.sinh(x) / x, safe.sinhc, lambda x: mp.sinh(x) / x if x else 1)


def _of_vector(*fns):
    return tuple(lambda x, y, fn=fn: fn(jnp.stack([x, y])) for fn in fns)


INF = jnp.inf
_NORM = (*_of_vector(jnp.linalg.norm, safe.norm), _HYPOT[2])
_STD = (*_of_vector(jnp.std, safe.std), lambda x, y: abs(x - y) / 2)
_COSINE = (
    lambda x, y: (x + y) / jnp.linalg.norm(jnp.stack([x, y])) / jnp.sqrt(2.0),
    lambda x, y: safe.cosine_similarity(jnp.stack([x, y]), jnp.ones(2)),
    lambda x, y: (x + y) / mp.sqrt(x * x + y * y) / mp.sqrt(2),
)
_LOGSUMEXP = _of_vector(jax.nn.logsumexp, safe.logsumexp)
_PREFIX = tuple(
    lambda x, y, fn=fn: fn(jnp.stack([jnp.float32(-INF), x, y]))[2]
    for fn in (jax.lax.cumlogsumexp, safe.cumlogsumexp)
)
_SOFTMAX = _of_vector(lambda x: jax.nn.softmax(x)[0], lambda x: safe.softmax(x)[0])
_ENTROPY = _of_vector(lambda p: jsp.entr(p).sum(), safe.entropy)

ROWS = [
    Row("sqrt(x)", (1,), (0.0,), jnp.sqrt, safe.sqrt, "∞"),
    Row(
        "where(x > 0, sqrt(x), 0)",
        (1,),
        (0.0,),
        _masked(jnp.sqrt, 0.0),
        _masked(safe.sqrt, 0.0),
        "0",
    ),
    Row(
        "where(x > 0, log(x), 0)",
        (1,),
        (0.0,),
        _masked(jnp.log, 0.0),
        _masked(safe.log, 0.0),
        "0",
    ),
    Row(
        "where(x > 0, 1 / x, 0)",
        (1,),
        (0.0,),
        _masked(jnp.reciprocal, 0.0),
        _masked(lambda x: safe.divide(1.0, x), 0.0),
        "0",
    ),
    Row(
        "where(x > 0, x**0.5, 0)",
        (1,),
        (0.0,),
        _masked(lambda x: jnp.power(x, 0.5), 0.0),
        _masked(lambda x: safe.power(x, 0.5), 0.0),
        "0",
    ),
    Row("x / y", (0, 1), (1e-30, 1e-25), jnp.divide, safe.divide, lambda x, y: x / y),
    Row("xlogy(x, y)", (0, 1), (0.0, 0.0), jsp.xlogy, safe.xlogy, "none"),
    Row("hypot(x, y)", (0, 1), (0.0, 0.0), *_HYPOT[:2], "none"),
    Row("hypot(x, y)", (0, 1), (1e30, 2e30), *_HYPOT),
    Row("hypot(x, y)", (1, 0), (1e-30, 2e-30), *_HYPOT),
    Row("hypot(x, y)", (2, 0), (1.0, 1.0), *_HYPOT),
    Row("arctan2(y, x)", (1, 0), (0.0, 0.0), *_ARCTAN2[:2], "none"),
    Row("arctan2(y, x)", (1, 0), (1e30, 1e30), *_ARCTAN2),
    Row("arctan2(y, x)", (1, 0), (1e-30, 1e-30), *_ARCTAN2),
    Row("arccos(x)", (1,), (1.0,), jnp.arccos, safe.arccos, "-∞"),
    Row("log(cosh(x))", (0,), (100.0,), *_LOG_COSH),
    Row("log(cosh(x))", (0,), (1e-4,), *_LOG_COSH),
    Row("log(cosh(x))", (2,), (20.0,), *_LOG_COSH),
    Row(
        "log(expm1(x))",
        (1,),
        (100.0,),
        lambda x: jnp.log(jnp.expm1(x)),
        safe.log_expm1,
        lambda x: mp.log(mp.expm1(x)),
    ),
    Row(
        "log(exp(x) - exp(y))",
        (1, 0),
        (100.0, 99.0),
        lambda x, y: jnp.log(jnp.exp(x) - jnp.exp(y)),
        safe.log_sub_exp,
        lambda x, y: mp.log(mp.exp(x) - mp.exp(y)),
    ),
    Row(
        "log_ndtr(x)",
        (0,),
        (5.0,),
        *_LOG_NDTR[:2],
        lambda x: mp.log1p(-mp.erfc(x / mp.sqrt(2)) / 2),
    ),
    Row("log_ndtr(x)", (1,), (-1e3,), *_LOG_NDTR),
    Row("log_ndtr(x)", (1,), (-1e5,), *_LOG_NDTR[:2], "1e+05"),
    Row("log_ndtr(x)", (2,), (-100.0,), *_LOG_NDTR),
    Row("expm1(x) / x", (1,), (0.0,), *_EXPM1),
    Row("expm1(x) / x", (1,), (0.0009765625,), *_EXPM1),
    Row("expm1(x) / x", (0,), (90.0,), *_EXPM1),
    Row("log1p(x) / x", (1,), (0.0009765625,), *_LOG1P),
    Row("sinh(x) / x", (1,), (0.0009765625,), *_SINHC),
    Row("sinh(x) / x", (2,), (0.0,), *_SINHC),
    Row("norm([x, y])", (1, 0), (0.0, 0.0), *_NORM[:2], "none"),
    Row("norm([x, y])", (0, 0), (1e30, 1e30), *_NORM),
    Row("norm([x, y])", (1, 0), (1e30, 1e30), *_NORM),
    Row("norm([x, y])", (1, 0), (1e-30, 1e-30), *_NORM),
    Row("std([x, y])", (1, 0), (1.0, 1.0), *_STD[:2], "none"),
    Row("std([x, y])", (1, 0), (1e30, -1e30), *_STD),
    Row("cosine([x, y], [1, 1])", (1, 0), (1e-30, 2e-30), *_COSINE),
    Row("logsumexp([x, y])", (1, 0), (-INF, -INF), *_LOGSUMEXP, "none"),
    Row("logsumexp([x, y])", (1, 0), (INF, 0.0), *_LOGSUMEXP, "1"),
    Row("logaddexp(x, y)", (1, 0), (-INF, -INF), jnp.logaddexp, safe.logaddexp, "none"),
    Row("cumlogsumexp([-∞, x, y])[2]", (1, 0), (-INF, 0.0), *_PREFIX, "0"),
    Row("softmax([x, y])[0]", (1, 0), (-INF, -INF), *_SOFTMAX, "none"),
    Row("entropy([x, y])", (1, 0), (0.0, 1.0), *_ENTROPY, "∞"),
]


def _derivative(fn, order):
    for i, times in enumerate(order):
        for _ in range(times):
            fn = jax.grad(fn, argnums=i)
    return fn


def _cells(row: Row) -> list[str]:
    what = {0: "value", 1: "derivative", 2: "second derivative"}[sum(row.order)]
    if len(row.order) > 1 and any(row.order):
        name = row.name.partition("(")[2].rstrip(")") if "(" in row.name else "x, y"
        arguments = ["y", "x"] if name.startswith("y") else ["x", "y"]
        what += f" by `{arguments[row.order.index(max(row.order))]}`"
    rounded = [jnp.float32(x) for x in row.point]
    point = ", ".join(f"{float(x):.3g}" for x in rounded).replace("inf", "∞")
    found = [float(_derivative(fn, row.order)(*rounded)) for fn in (row.jax, row.ours)]
    if callable(row.truth):
        with mp.workdps(50):
            truth = partial(row.truth, row.order) if any(row.order) else row.truth
            exact = f"{float(truth(*(mp.mpf(float(x)) for x in rounded))):.5g}"
    else:
        exact = row.truth
    numbers = [f"{x + 0.0:.5g}".replace("inf", "∞") for x in found]
    return [f"`{row.name}`", what, point, *numbers, exact]


def table() -> str:
    """The table, with what the installed JAX gives."""
    lines = [
        "| function | quantity | at | plain JAX | `eqg.safe` | truth |",
        "|---|---|--:|--:|--:|--:|",
        *("| " + " | ".join(_cells(row)) + " |" for row in ROWS),
    ]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page, with the table as it is now."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return before + START + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
