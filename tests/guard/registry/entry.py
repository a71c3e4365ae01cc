"""An op in the registry: how to call it, and what it is without the library."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


# Value and derivatives. The second-order compositions are named outer over inner: `"FR"` is
# forward over reverse mode.
ORDERS = ("value", "jvp", "vjp", "FF", "FR", "RF", "RR")


class Nasty:
    """A point at the edge of the domain, at which value and cotangents are compared.

    `value` and `cts` are the expected ones, for a cotangent of ones. By default they are those
    of `plain`, NaN and infinity included. `second` is the gradient of the sum of the
    cotangents, the first once, the next twice and so on, if it is given. With `each`, the
    tolerance is relative to each number, and not to the largest.
    """

    def __init__(
        self, *args: Any, value: Any = None, cts: Any = None, second: Any = None,
        each: bool = False,
    ):  # fmt: skip
        self.args, self.value, self.cts = args, value, cts
        self.second, self.each = second, each


@dataclasses.dataclass(frozen=True)
class Entry:
    """An op with arguments, and with references that do not use the library.

    All floating arrays in `args` (NumPy arrays of float64, in any tree) are perturbed. They are
    cast to the dtype in which the op is run, so that `fn` and `plain` take any.
    """

    name: str  # the public name, and after a colon what is special
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    # The value by JAX or NumPy alone. Autodiff of it is the derivative, to all orders, unless
    # there is a `smooth`.
    plain: Callable[..., Any]
    _: dataclasses.KW_ONLY
    # The function whose derivative it has, if that is not the one of `plain`.
    smooth: Callable[..., Any] | None = None
    # Another reference in forward mode, for ops whose two modes differ. `plain` is a function
    # with a raw `jax.custom_vjp` then.
    forward: Callable[..., Any] | None = None
    # Whether `plain` has a raw rule, so that its derivative is not that of its value.
    own_rule: bool = False
    orders: Sequence[str] = ORDERS
    nasty: Sequence[Nasty] = ()
    # Arguments with long sums, run in bfloat16 and float16: the error stays that of rounding
    # the inputs and the result.
    half: tuple[Any, ...] | None = None
    half_as_plain: bool = True  # whether outputs then have the dtypes of those of `plain`
    complex_args: tuple[Any, ...] | None = None
    # Arguments of which some places do not count, and the same with garbage (NaN, infinity)
    # there: values and cotangents of all else are equal. `counts` says which outputs count.
    garbage: tuple[Any, ...] | None = None
    counts: Callable[[Any], Any] | None = None
    tolerance: float = 1e-9  # relative, in float64
    tolerance32: float = 2e-4  # in float32
    precisions: Sequence[str] = ("float64", "float32")
    # Whether it draws random numbers, which are others in another precision.
    draws: bool = False
    batches: bool = True  # whether it may be called under `vmap`
    # Whether it also runs inside `scan`, `checkpoint` and `vmap`, with captured arrays. Off for
    # an option that changes nothing about that: these programs take most of the time.
    transforms: bool = True
    leaks: bool = True  # whether it passes JAX's leak checker, as Lineax and Optimistix do not
    costs: bool = True  # whether frozen arguments must cost nothing


ENTRIES: dict[str, Entry] = {}


def entry(name: str, fn: Callable[..., Any], *args: Any, plain: Callable[..., Any], **options):
    """Enter an op."""
    assert name not in ENTRIES, name
    ENTRIES[name] = Entry(name, fn, args, plain, **options)
