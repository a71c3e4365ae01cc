"""`safe`: functions of single numbers, against mpmath, and what each does at its poles."""

import functools as ft
import types
from typing import Any

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from mpmath import mp

from .entry import entry, Nasty, ORDERS


# A line has as many arguments as there is room for.
# fmt: off
safe = eqg.safe
NAN, INF = np.nan, np.inf
ONCE = {"transforms": False, "costs": False}


def exact(formula, *columns, smooth=False):
    """Value and derivatives by differences with 350 digits, of the formula at each point.

    A function that is not `smooth` changes on the scale of its arguments, however small.
    """
    rows = []
    with mp.workdps(350):
        for point in zip(*columns, strict=True):
            xs = [mp.mpf(float(x)) for x in point]
            hs = [mp.mpf(10) ** -25 * (max(abs(x), 1) if smooth else abs(x) or 1) for x in xs]
            at = lambda *k, xs=xs, hs=hs: formula(
                mp, *(x + n * h for x, n, h in zip(xs, k, hs, strict=True))
            )
            if len(xs) == 1:
                (h,), low, middle, high = hs, at(-1), at(0), at(1)
                rows.append([middle, (high - low) / (2 * h), (high - 2 * middle + low) / h**2])
                continue
            (h, k), middle = hs, at(0, 0)
            x_up, x_down, y_up, y_down = at(1, 0), at(-1, 0), at(0, 1), at(0, -1)
            mixed = (at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / (4 * h * k)
            d_xx = (x_up - 2 * middle + x_down) / h**2
            d_yy = (y_up - 2 * middle + y_down) / k**2
            slopes = [(x_up - x_down) / (2 * h), (y_up - y_down) / (2 * k)]
            rows.append([middle, *slopes, d_xx + 2 * mixed, mixed + 2 * d_yy])
    n = len(columns)
    value, *rest = (
        np.array([float(x.real) for x in column]) for column in zip(*rows, strict=True)
    )
    return Nasty(*columns, value=value, cts=rest[:n], second=rest[n:], each=True)


def rows(text):
    """The columns of a table of numbers."""
    return np.array([[float(x) for x in row.split()] for row in text.split(",")]).T


def poles(n, text):
    """By convention: the `n` arguments, the value, the cotangents, and second derivatives."""
    columns = list(rows(text))
    args, value, rest = columns[:n], columns[n], columns[n + 1 :]
    return Nasty(*args, value=value, cts=rest[:n], second=rest[n:] or None, each=True)


def joined(nasty):
    """One point for all that have second derivatives, and one for the others."""
    for is_second in (True, False):
        group = [x for x in nasty if (x.second is not None) == is_second]
        columns = lambda name, group=group: [
            np.concatenate(parts)
            for parts in zip(*(getattr(x, name) for x in group), strict=True)
        ]
        if group:
            second = columns("second") if is_second else None
            value = np.concatenate([x.value for x in group])
            args, cts = columns("args"), columns("cts")
            yield Nasty(*args, value=value, cts=cts, second=second, each=True)


A, B = np.array([[0.3, -0.6, 0.8]]), np.array([[1.5], [0.4], [-0.7], [2.6]])
POSITIVE, ONE = np.array([0.3, 1.6, 2.8]), (np.append(A, B),)
LARGE = "1e-200, 3e-20, 0.7, 5, 2e20, 3e200"
NEAR_ZERO = "0, 1e-30, -2e-9, 1e-5, -0.3, 0.97, -0.99, 1.03, 7"
OF_JAX = types.SimpleNamespace(**vars(jnp), erfc=jax.scipy.special.erfc, mpf=float)
ratio = lambda fn: lambda m, x: getattr(m, fn)(x) / x if m is OF_JAX or x else m.mpf(1)
AB, PB = (A, B), (POSITIVE[None], B)

# The formula for JAX and mpmath, arguments, points at which it is right, and poles.
FORMULAS: dict[str, tuple[Any, Any, str, str]] = {
    "log": (lambda m, x: m.log(x), (POSITIVE,), LARGE, "0 -inf 0 nan, -2 nan 0 0, inf inf 0 0"),
    "sqrt": (lambda m, x: m.sqrt(x), (POSITIVE,), LARGE, "0 0 0 nan, -2 nan 0 0, inf inf 0 0"),
    "divide": (
        *(lambda m, x, y: x / y, AB, "1e-30 1e-100, 1e150 -1e100, -1e-200 1e-150, 3 1e90"),
        "1 0 inf 0 0 nan nan, 0 0 nan 0 0 nan nan, inf 2 inf 0.5 0 0 -0.25, 3 -inf 0 0 0 0 0",
    ),
    # A power whose exponent is whole is a polynomial at zero, too.
    "power": (
        *(lambda m, x, y: x**y, PB, "1e-200 0.5, 1e-10 -3.5, 4e100 1.2, 2 900, 0.9 1e-12"),
        "0 0.5 0 0 0 nan nan, 0 2 0 0 0 2 0, 0 2.5 0 0 0 0 0, 0 1 0 1 0 nan nan,"
        "0 0 1 0 0 nan nan, 0 -1 inf 0 0 nan nan, -2 3 -8 12 0 -12 0, -2 2 4 -4 0 2 0,"
        "-2 0.5 nan 0 0 0 0, inf 0.5 inf 0 0 0 0, inf 2 inf 0 0 2 0, 2 inf inf 0 0 0 0,"
        "-3 9007199254740992 inf -inf 0 nan 0",
    ),
    "hypot": (
        lambda m, x, y: m.sqrt(x * x + y * y),  # `mp.hypot` rounds too much
        *(AB, "1e-200 3e-200, 3e200 -1e200, 0 -2, 3 4e-20, -1e9 1e9"),
        "0 0 0 0 0 nan nan, -inf 1 inf -1 0 0 0,"
        "inf -inf inf 0.7071067811865476 -0.7071067811865476 0 0",
    ),
    "arctan2": (
        lambda m, y, x: m.atan2(y, x),
        *(AB, "1e-100 2e-100, 3e100 -1e100, 2 0, -2 -3, 1e-9 -1e9"),
        "0 0 0 0 0 nan nan, 0 -2 3.141592653589793 -0.5 0 -0.5 -0.25,"
        "inf 1 1.5707963267948966 0 0 0 0",
    ),
    "arccos": (
        *(lambda m, x: m.acos(x), (A,), "0.999999999999, -0.999999999999, 1e-30, 0.6"),
        "1 0 0 nan, -1 3.141592653589793 0 nan, 1.5 nan 0 0, -3 nan 0 0",
    ),
    "arcsin": (
        *(lambda m, x: m.asin(x), (A,), "0.999999999999, -0.999999999999, 1e-30, 0.6"),
        "1 1.5707963267948966 0 nan, -1 -1.5707963267948966 0 nan, 1.5 nan 0 0",
    ),
    "xlogy": (
        *(lambda m, x, y: x * m.log(y), (A, POSITIVE[:, None])),
        "1e-200 1e-100, -3e100 2e100, 2 1e-9",
        "0 0 0 0 0 nan nan, 2 0 -inf 0 0 nan nan, 0 2 0 0.6931471805599453 0 1 0.5,"
        "2 -1 nan 0 0 0 0, 2 inf inf 0 0 0 0",
    ),
    "xlog1py": (
        *(lambda m, x, y: x * m.log1p(y), (A, POSITIVE[:, None])),
        "1e-200 1e-100, -3e100 2e100, 2 1e-17, 3 -0.999999999",
        "0 -1 0 0 0 nan nan, 2 -1 -inf 0 0 nan nan, 3 0 0 0 3 2 -5, 2 -2 nan 0 0 0 0",
    ),
    "log_cosh": (
        *(lambda m, x: m.log(m.cosh(x)), (A,)),
        *("0, 1e-9, -1e-3, 19, -21, 300", "-inf inf -1 0"),
    ),
    "log_expm1": (
        *(lambda m, x: m.log(m.expm1(x)), (POSITIVE,)),
        *("1e-100, 1e-9, 0.69, 0.7, 30, 600", "0 -inf 0 nan, -2 nan 0 0, inf inf 1 0"),
    ),
    "log_sub_exp": (
        lambda m, x, y: m.log(m.exp(x) - m.exp(y)), (POSITIVE[None], np.array([[0.1], [-0.6]])),
        "1000 999, 2 -500, 0.25 0.125, 1e-6 -1e-6, 0 -15, 0 -80",
        "2 2 -inf 0 0 nan nan, -inf -inf -inf 0 0 0 0, 3 -inf 3 1 0 0 0, 1 2 nan 0 0 0 0",
    ),
    "expm1_ratio": (ratio("expm1"), ONE, NEAR_ZERO + ", -40, 700, 712, -1e9", "-inf 0 0 0"),
    "log1p_ratio": (
        *(ratio("log1p"), ONE, NEAR_ZERO + ", -0.51, -0.49, 1e9, -0.999999999"),
        "-1 inf 0 nan, -2 nan 0 0, inf 0 0 0",
    ),
    "sinhc": (ratio("sinh"), ONE, NEAR_ZERO + ", -40, 700, -712", "inf inf 0 0"),
    "logaddexp": (
        *(lambda m, x, y: m.log(m.exp(x) + m.exp(y)), AB),
        "1000 999, 2 -300, -300 2, -2e3 -2e3",
        "-inf -inf -inf 0 0 0 0, inf inf inf 0.5 0.5 0 0, 3 -inf 3 1 0 0 0, inf 3 inf 1 0 0 0",
    ),
    "log_ndtr": (
        *(lambda m, x: m.log(m.erfc(-x / m.sqrt(m.mpf(2))) / 2), ONE),
        "-1e5, -300, -5, -3.01, -2.99, -1.5, -0.01, 0, 0.59, 0.61, 2.99, 3.01, 9, 30",
        "-inf -inf 0 0, inf 0 0 0",
    ),
}
# Where the formula is smooth at zero, and where half precision has to be widened.
SMOOTH = ("arccos", "arcsin", "xlog1py", "log_cosh", "expm1_ratio", "log1p_ratio", "sinhc")
SMOOTH += ("log_sub_exp", "logaddexp", "log_ndtr")
FULL = ("divide",)  # of the others, each has the same rule in all programs
HALF = ("power", "xlogy", "sinhc")

for _name, (_formula, _args, _points, _poles) in FORMULAS.items():
    _is_smooth, _is_full = _name in SMOOTH, _name in FULL
    _points = exact(_formula, *rows(_points), smooth=_is_smooth)
    entry(*(f"safe.{_name}", getattr(safe, _name), *_args), plain=ft.partial(_formula, OF_JAX),
        nasty=tuple(joined([_points, poles(len(_args), _poles)])),
        half=_args if _name in HALF else None, tolerance=1e-12,
        orders=ORDERS if _is_full else ("value", "jvp", "vjp", "FR"),
        **{} if _is_full else ONCE)


def _numbers(i, x):
    """Integers, Python's numbers and half precision."""
    count, half = jnp.array([1, 4]), jnp.array([0.5, 3.0], jnp.bfloat16)
    outs = (
        safe.log(i), safe.power(2, i), safe.divide(x, i), safe.xlogy(x, 3), safe.hypot(half, 2),
    )
    return *outs, safe.norm(count), safe.logsumexp(count), safe.softmax(half), safe.std(half)


def _numbers_plain(i, x):
    f, half = i.astype(jnp.zeros(()).dtype), np.array([0.5, 3.0])
    in_half = lambda *xs: [jnp.asarray(x, jnp.bfloat16) for x in xs]
    outs = jnp.log(f), 2**f, x / f.astype(x.dtype), x * np.log(3.0), *in_half(np.hypot(half, 2))
    two = np.exp(half) / np.exp(half).sum()
    lengths = jnp.array(17**0.5), jnp.log(jnp.exp(jnp.array(1.0)) + jnp.exp(4.0))
    return *outs, *lengths, *in_half(two, half.std())


entry("safe.norm: integers and half precision", _numbers, np.array([2, 5]),
    np.array([0.7, -1.2]), plain=_numbers_plain, half_as_plain=False, orders=("value", "vjp"),
    transforms=False)

# The logarithm has no value where `x` is not above one.
entry("safe.where", lambda x, scale, other: safe.where(
        x > 1, lambda xy: jnp.arccosh(scale * xy[0]) * xy[1], (x, 0.3 * x), other,
        substitute=2.0,
    ), np.array([[0.3, 1.6], [-0.4, 2.8]]), np.array(1.5), np.array([[0.7], [-1.1]]),
    plain=lambda x, scale, other: jnp.where(
        x > 1, jnp.arccosh(scale * jnp.where(x > 1, x, 2.0)) * 0.3 * x, other
    ))
entry("safe.where: garbage",
    lambda x: safe.where(
        x > 0, lambda x: jnp.log(x) / jnp.sqrt(x), x, -1.0, substitute=np.float32(0.5)
    ),
    np.array([0.3, -1.6, 0.4, -2.8]),
    plain=lambda x: jnp.where(x > 0, jnp.log(abs(x)) / jnp.sqrt(abs(x)), -1.0),
    nasty=[Nasty(np.array([0.0, -INF]), value=np.full(2, -1.0), cts=np.zeros(2))],
    garbage=(np.array([0.3, NAN, 0.4, -INF]),),
    counts=lambda out: np.array([True, False, True, False]), orders=("value", "vjp"),
    transforms=False)
