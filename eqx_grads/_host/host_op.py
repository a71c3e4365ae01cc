"""A NumPy function of flat arrays with types: what runs on the host, and what it may return."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import rule_error, RuleError, type_of
from .._rules.closure_convert import Opaque


Types = tuple[jax.ShapeDtypeStruct, ...]


def is_inexact(t: Any) -> bool:
    return jnp.issubdtype(t.dtype, jnp.inexact)


def is_complex(t: Any) -> bool:
    return jnp.issubdtype(t.dtype, jnp.complexfloating)


def inexact(types: Types) -> Types:
    return tuple(filter(is_inexact, types))


@dataclasses.dataclass(frozen=True)
class HostOp(Opaque):
    """A function of a list of NumPy arrays that returns a list of NumPy arrays.

    JAX keeps compiled programs by it, so it is compared by what it is made of.

    - `run(op, arrays)`, with `parts` to go by, calls the user's code. The arrays may have more
        axes in front than `in_types` say: the axes of `vmap`.
    - `call`: the call of the user's function, or the call that this op is derived from.
    - `source`: the user's code that runs, a function or a rule: its name and place.
    - `out_path(i)`: where output number `i` is, in the user's words.
    """

    run: Callable[["HostOp", Sequence[np.ndarray]], list[Any]]
    call: Any
    parts: tuple[Any, ...]
    source: Any
    in_types: Types = dataclasses.field(compare=False)
    out_types: Types = dataclasses.field(compare=False)
    out_path: Callable[[int], str] = dataclasses.field(compare=False)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def place(self) -> str:
        return self.source.place

    @property
    def vmap_method(self) -> str:
        return self.call.code.vmap_method

    @property
    def described(self) -> str:
        """The function that runs; of a rule, whose it is."""
        function = self.call.name
        return f"`{self.name}`" if self.name == function else f"`{self.name}` of `{function}`"

    @property
    def has_derivative(self) -> bool:
        code = self.call.code
        has_rule = not self.parts and (code.jvp or code.bwd) is not None
        return has_rule or code.finite_difference is not None

    def own_axes(self, arrays: Sequence[Any]) -> list[tuple[int, ...]]:
        """The axes of `vmap` in front of each array."""
        pairs = zip(arrays, self.in_types, strict=True)
        return [x.shape[: x.ndim - len(t.shape)] for x, t in pairs]

    def batch(self, arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
        """The axes of `vmap` of the outputs."""
        return np.broadcast_shapes(*self.own_axes(arrays))

    def outputs(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, of the promised shapes. Nothing is cast yet, so that a caller can take
        their differences.

        All arrays that host code returns enter the library here, and are copied. Host code may
        write into the same memory in its next call, as C and Fortran do, and a Jacobian is made
        of the outputs of several calls.
        """
        out = [np.array(x) for x in self.run(self, arrays)]
        return [self.fitted(i, x, arrays) for i, x in enumerate(out)]

    def cast_outputs(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs, of the promised types."""
        out = zip(self.outputs(arrays), self.out_types, strict=True)
        return [self._cast(i, x, t.dtype) for i, (x, t) in enumerate(out)]

    def fitted(
        self,
        i: int,
        x: np.ndarray,
        arrays: Sequence[np.ndarray],
        do: str = "Return an array of the promised shape, or promise another one.",
    ) -> np.ndarray:
        """Output number `i`, given the inputs, as an array with the axes of `vmap`; raises if
        it has a different shape than promised."""
        batch, shape = self.batch(arrays), self.out_types[i].shape
        if x.shape == batch + shape:
            return x
        if batch:
            do += (
                f" With `vmap_method={self.vmap_method!r}` the function is given the axes of "
                "`jax.vmap` in front, and returns them; with `'sequential'` it is not. With "
                f"`'broadcast_all'`, each argument has all of them. {BROADCAST_ARGUMENTS}"
            )
        promised = jax.ShapeDtypeStruct(batch + shape, self.out_types[i].dtype)
        raise self._misfit(i, "shape", x, promised, do)

    def _cast(self, i, x, dtype) -> np.ndarray:
        if np.can_cast(x.dtype, dtype, "same_kind"):
            with np.errstate(over="ignore"):  # as JAX: what float32 can't hold is infinite
                cast = x.astype(dtype)
            if is_inexact(cast) or np.array_equal(cast, x):
                return cast
        do = (
            "Floats are cast to the promised precision, and integers that fit to the promised "
            "width. Complex numbers are not cast to real ones, or floats to integers."
        )
        raise self._misfit(i, "dtype", x, jax.ShapeDtypeStruct(x.shape, dtype), do)

    def _misfit(self, i, what, got, promised, do) -> RuleError:
        return rule_error(
            f"{self.described} returned a different {what} than promised.",
            f"at {self.out_path(i)}: promised {type_of(promised)}, returned {type_of(got)}",
            self.place,
            do=do,
        )


BROADCAST_ARGUMENTS = (
    "If the arguments differ in their number of axes, broadcast them before the call, by "
    "`jnp.broadcast_arrays`."
)


def read_only(x: np.ndarray) -> np.ndarray:
    """`x`, to which host code can't write. It gets all arrays like this, as the library
    may give it the same array in the next call."""
    x.flags.writeable = False
    return x
