"""Norms, the semiring of logarithms, and decompositions, with finite derivatives."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .registry import case, vector


safe = eqg.safe
# Of each function of one vector: what it is where autodiff of it is right.
FORMULAS = {
    "norm": jnp.linalg.norm,
    "normalize": lambda x: x / jnp.linalg.norm(x),
    "std": jnp.std,
    "logsumexp": jax.nn.logsumexp,
    "cumlogsumexp": jax.lax.cumlogsumexp,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
}

for _name, _formula in FORMULAS.items():

    @case(f"safe.{_name}", reference=_formula)
    def _(name=_name):
        return getattr(safe, name), (vector(),)


for _ord in (1, jnp.inf):

    @case(f"safe.norm: {_ord}", reference=lambda x, ord=_ord: jnp.linalg.norm(x, ord))
    def _(ord=_ord):
        return lambda x: safe.norm(x, ord), (vector(),)


@case(
    "safe.logsumexp: factors",
    reference=lambda a, b: jax.scipy.special.logsumexp(a, b=b, return_sign=True)[0],
)
def _():
    return lambda a, b: safe.logsumexp(a, b=b, return_sign=True)[0], (vector(), vector() + 0.1)


@case("safe.logaddexp", reference=jnp.logaddexp)
def _():
    return safe.logaddexp, (vector(), vector()[::-1] ** 2)


@case("safe.entropy", reference=lambda p: -jnp.sum(p * jnp.log(p)))
def _():
    return safe.entropy, (jnp.array([0.2, 0.5, 0.3]),)


def _cosine(x, y):
    return jnp.vdot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y))


@case("safe.cosine_similarity", reference=_cosine)
def _():
    return safe.cosine_similarity, (vector(), vector() ** 2)


def _distances(x, y):
    return jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1))


@case("safe.pairwise_distance", reference=_distances)
def _():
    x = jnp.array([[0.5, -1.2], [2.0, 0.3]])
    y = jnp.array([[1.5, 0.7], [-0.4, 0.1], [3.0, -1.0]])
    return safe.pairwise_distance, (x, y)


_MATRIX = jnp.array([[1.0, 0.2, -0.3], [0.2, -0.5, 0.4], [-0.3, 0.4, 0.2]])


@case("safe.eigh", reference=lambda a: tuple(jnp.linalg.eigh(a)))
def _():
    return lambda a: tuple(safe.eigh(a)), (_MATRIX,)


@case(
    "safe.svd",
    reference=lambda a: tuple(jnp.linalg.svd(a, full_matrices=False)),
)
def _():
    return lambda a: tuple(safe.svd(a)), (_MATRIX[:2],)
