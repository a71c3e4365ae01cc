"""The simplified state space layer S5, as a layer over time."""

import functools as ft
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from ..._errors import bad_argument, rule_error
from ..._rules.float_args import is_number
from ..._tangent_spaces import promote
from .._arguments import as_sizes
from .._recurrent.stack import StackOptions
from .diagonal import AbstractDiagonal, AbstractDiagonalCell, make_skip


class S5Cell(AbstractDiagonalCell):
    """The parameters of a simplified state space layer."""

    log_decay: Float[Array, " state"]
    frequency: Float[Array, " state"]
    log_step: Float[Array, " state"]
    weight_in: Float[Array, "2 state in"]
    weight_out: Float[Array, "2 out state"]
    skip: Float[Array, "..."]
    input_size: int = eqx.field(static=True)

    def __init__(self, input_size, *, output_size, state_size, blocks, steps, dtype, key):
        keys = iter(jr.split(key, 4))
        frequency, basis = hippo_normal(state_size // blocks)
        frequency, basis = np.tile(frequency, blocks), np.kron(np.eye(blocks), basis)
        low, high = np.log(steps)
        half = state_size // 2
        as_parts = lambda z: jnp.stack([jnp.real(z), jnp.imag(z)]).astype(dtype)
        weight_in = jr.normal(next(keys), (state_size, input_size)) * input_size**-0.5
        weight_out = jr.normal(next(keys), (output_size, state_size)) * state_size**-0.5
        basis = jnp.asarray(basis, promote([weight_in, jnp.complex64]))
        # In single precision at least. Over many steps, a phase that was rounded to half
        # precision is another phase: the outputs would be wrong by 2 to 8 %.
        wide = promote([jnp.zeros((), dtype), jnp.float32])
        self.log_decay = jnp.full(half, np.log(0.5), wide)
        self.frequency = jnp.asarray(frequency, wide)
        self.log_step = jr.uniform(next(keys), (half,), minval=low, maxval=high).astype(wide)
        self.weight_in = as_parts(basis.conj().T @ weight_in.astype(basis.dtype))
        self.weight_out = as_parts(weight_out.astype(basis.dtype) @ basis)
        self.skip = make_skip(next(keys), input_size, output_size, dtype)
        self.input_size = input_size

    def factors(self, dtype):
        decay, step = (jnp.exp(p.astype(dtype)) for p in (self.log_decay, self.log_step))
        frequency = self.frequency.astype(dtype)
        rate = jax.lax.complex(-decay, frequency)
        exponent = jax.lax.complex(-decay * step, frequency * step)
        # Not `exp(exponent) - 1`, which loses most digits where steps are short.
        return jnp.exp(exponent), jnp.expm1(exponent) / rate, 2.0


def hippo_normal(size: int) -> tuple[np.ndarray, np.ndarray]:
    r"""The eigenvalues $-\frac12 + i\,\omega$ of the normal part of HiPPO-LegS with
    $\omega > 0$: their frequencies $\omega$, and the eigenvectors in columns."""
    root = np.sqrt(2 * np.arange(size) + 1)
    # The normal part is -1/2 plus this antisymmetric matrix. Times i, it is Hermitian.
    skew = -0.5 * (np.tril(np.outer(root, root), -1) - np.triu(np.outer(root, root), 1))
    frequencies, vectors = np.linalg.eigh(-1j * skew)
    half = slice(size // 2, None)
    frequencies, vectors = frequencies[half], vectors[:, half]
    # The phase of an eigenvector is arbitrary. Here the first component is positive, so that
    # the initial values are the same on all machines.
    return frequencies, vectors * np.abs(vectors[0]) / vectors[0]


class S5(AbstractDiagonal):
    r"""A simplified state space layer over time.

    It solves a linear differential equation in a complex state. The solution is exact, because
    the input is constant within each step ("zero-order hold"). With elementwise products,

    $$h_t = e^{\lambda\delta}\,h_{t-1} + \frac{e^{\lambda\delta} - 1}{\lambda}\,B x_t, \qquad
    y_t = \phi(2\,\mathrm{Re}(C h_t) + D x_t), \qquad
    \lambda = -e^{\nu} + i\,\omega, \quad \delta = e^{\tau}.$$

    It is initialized as the normal part of HiPPO-LegS, whose states are the coefficients of
    the past inputs in Legendre polynomials. Its eigenvalues are $\lambda = -\frac12 +
    i\,\omega$, and $B$ and $C$ are random matrices in the basis of its eigenvectors. The
    eigenvalues are conjugate pairs, so the half with $\omega > 0$ is enough for a real output.
    The real part of $\lambda$ is $-e^{\nu}$ (as in S4D), so that all states stay stable.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        s5 = eqg.nn.S5(3, 3, 16, activation=jax.nn.gelu, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(s5):
            ys, state = s5(xs)
            print(ys.shape, state.shape)
            return jnp.sum(ys**2)

        print(gradient(s5).cells[0][0].log_step.shape)
        ```

        ```text
        (5, 20, 3) (5, 8)
        (8,)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `log_decay`
    ($\nu$), `frequency` ($\omega$), `log_step` ($\tau$), `weight_in` ($B$), `weight_out` ($C$)
    and `skip` ($D$). All are real: $B$ and $C$ have first the real and then the imaginary
    parts. `skip` is a vector if there are as many outputs as inputs, and otherwise a matrix.

    For single steps, call `layer.step(x, state)` with the state that the last call returned.

    States are complex. They have single precision at least, and so do `log_decay`,
    `frequency` and `log_step`. With a `dtype` and inputs of half precision, the recurrence
    runs in single precision, and the outputs have half precision. Do not cast these three
    parameters to half precision: the steps would lose digits, and the layer would be another
    filter.

    **Derivative:**

    The derivative of [`eqx_grads.linear_recurrence`][], which is the same recurrence in the
    other direction, and plain differentiation around it. Both modes, all orders. The gradient
    of each weight is one matrix product for all steps and the batch.

    ??? cite

        [Simplified State Space Layers for Sequence
        Modeling](https://arxiv.org/abs/2208.04933)

        ```bibtex
        @inproceedings{smith2023simplified,
            author={Smith, Jimmy T. H. and Warrington, Andrew and Linderman, Scott W.},
            title={Simplified State Space Layers for Sequence Modeling},
            booktitle={International Conference on Learning Representations},
            year={2023},
        }
        ```
    """

    method: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        output_size: int,
        state_size: int,
        *,
        blocks: int = 1,
        min_step: float = 0.001,
        max_step: float = 0.1,
        activation: Callable[[Array], Array] | None = None,
        method: str = "auto",
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        r"""**Arguments:**

        - `input_size`, `output_size`: the numbers of features.
        - `state_size`: the number of eigenvalues. The state is half as many complex numbers.
        - `blocks`: the number of HiPPO matrices that give the initial eigenvalues. Each has the
            size `state_size / blocks`, which has to be even.
        - `min_step`, `max_step`: the initial $\log \delta$ is uniform between the logarithms of
            these. The time constant of a state is of the order of $1 / \delta$ steps.
        - `activation`: $\phi$, applied to all outputs. By default it is the identity, and a
            stack of several layers is linear.
        - `method`: as for [`eqx_grads.linear_recurrence`][].

        All others as for [`eqx_grads.nn.GRU`][]. A learned initial state is `initial_parts`,
        its real and its imaginary part.
        """
        state_size, blocks = as_sizes("S5", state_size=state_size, blocks=blocks)
        if state_size % (2 * blocks) != 0:
            do = "The eigenvalues of each of the `blocks` are pairs."
            raise bad_argument(
                "S5", "state_size", f"a multiple of {2 * blocks}", state_size, do
            )
        are_numbers = is_number(min_step) and is_number(max_step)
        if not (are_numbers and 0 < min_step <= max_step < np.inf):
            raise rule_error(
                "`S5` needs `0 < min_step <= max_step`.",
                f"`min_step` is {min_step}, `max_step` is {max_step}",
                do="Choose two positive steps in this order.",
            )
        make = ft.partial(S5Cell, blocks=blocks, steps=(float(min_step), float(max_step)))
        sizes = {"input_size": input_size, "output_size": output_size, "state_size": state_size}
        self._set(make, sizes, activation, method, dtype, key, options)
