"""`linear_host_function`: a linear map that runs on the host, with its adjoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import check_function, name_of, place_of, rule_error, show_path, type_of
from .._errors.trees import mirror_of
from .._jaxprs.varying import vary_alike, varying_types
from .._rules.adjoint_pair import apply_side, Side
from .._rules.wrapper import reduce_by_name, set_metadata
from .derivative import host_call, tangent_type
from .host_call import host_call_of, HostCall, HostCode
from .host_callback import VMAP_METHODS
from .host_op import is_inexact
from .promised_types import is_array_leaf, without_memory


class LinearHostFunction(eqx.Module):
    """A linear map that runs on the host. Made by [`eqx_grads.linear_host_function`][]."""

    _matvec: HostCode = eqx.field(static=True)
    _rmatvec: HostCode = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self._matvec.fn

    def __call__(self, x: PyTree, /, *args: Any) -> Any:
        """Apply the map.

        **Arguments:**

        - `x`: a PyTree of floating or complex arrays, in which the map is linear.
        - `args`: parameters: any PyTrees, which both functions are given.

        **Returns:**

        What `matvec` returned, as JAX arrays of the promised types.
        """
        _check_inexact(self._matvec, x)
        out = _like if self._matvec.out is None else self._matvec.out
        others = [self._rmatvec.fn]
        call, operands = host_call_of(self._matvec, (x, *args), {}, out, others)
        leaves, treedef = jax.tree.flatten(x)
        n = len(leaves)
        pair = _Pair(call, self._rmatvec, n, treedef, len(args))
        return jax.tree.unflatten(call.out_treedef, pair.apply(operands[n:], operands[:n]))

    def __reduce__(self):
        return reduce_by_name(self, self._matvec.fn)

    def __repr__(self):
        return f"<eqx_grads.linear_host_function of {self._matvec.name}>"


def _like(x, *args):
    del args
    return x


def _check_inexact(code: HostCode, x: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not (is_array_leaf(leaf) and is_inexact(jnp.asarray(leaf))):
            raise rule_error(
                f"`{code.name}` is linear in its first argument, which has to be floating or "
                "complex.",
                f"at `{code.signature.names[0]}{show_path(path)}`: {type_of(leaf)}",
                code.place,
                do="Cast it, or pass it as one of the parameters behind the first argument.",
            )


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A linear map and its transpose.

    `n` is the number of arrays in the first argument, of structure `treedef`. The arrays behind
    these are the parameters, residuals of both maps; they are in `n_args` arguments.
    """

    call: HostCall
    rmatvec: HostCode
    n: int
    treedef: Any
    n_args: int

    def apply(self, parameters, xs):
        # Inside `shard_map`, the transpose of the cast sums the cotangents of the devices.
        n = len(parameters)
        operands = vary_alike([*parameters, *xs])
        types_of = lambda types: varying_types(map(tangent_type, types), operands)
        matvec = Side(self.call.name, self._matvec, types_of(self.call.out_types))
        in_types = types_of(self.call.in_types[: self.n])
        rmatvec = Side(self.rmatvec.name, self._rmatvec, in_types)
        return apply_side(matvec, rmatvec, operands[:n], operands[n:])

    def _matvec(self, parameters, xs):
        return host_call(self.call.op, [*xs, *parameters])

    def _rmatvec(self, parameters, cts):
        """The transpose, which is the conjugate of the adjoint of the conjugate."""
        types = self.call.in_types[: self.n]
        like = without_memory(types)
        args, _ = self.call.arguments([*like, *parameters])
        ct = jax.tree.unflatten(self.call.out_treedef, [jnp.conj(ct) for ct in cts])
        given = (ct, *args[1 : 1 + self.n_args])
        out = mirror_of(self.treedef, types, like)
        adjoint, operands = host_call_of(self.rmatvec, given, {}, out)
        return [jnp.conj(x) for x in host_call(adjoint.op, operands)]


def linear_host_function(
    matvec: Any,
    rmatvec: Any,
    *,
    out: PyTree | Callable[..., PyTree] = None,
    vmap_method: str = "sequential",
) -> LinearHostFunction:
    r"""A linear map that JAX can't trace, given by two functions: itself and its adjoint.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        from scipy.fft import dct

        cosine = eqg.linear_host_function(
            lambda x: dct(x, norm="ortho"), lambda y: dct(y, type=3, norm="ortho")
        )
        loss = lambda x: jnp.sum(cosine(x) ** 4)
        x = jnp.array([1.0, -2.0, 0.5])
        hessian = jax.hessian(loss)(x)
        matrix = jax.jacfwd(cosine)(x)
        assert jnp.allclose(
            hessian, matrix.T @ jnp.diag(12 * cosine(x) ** 2) @ matrix, atol=1e-4
        )
        ```

    **Arguments:**

    - `matvec`: called as `matvec(x, *args)` with NumPy arrays; linear in `x`, which is any tree
        of floating or complex arrays. The other arguments are parameters.
    - `rmatvec`: called as `rmatvec(y, *args)`, where `y` is like the output; returns what is
        like `x`. For a complex map it is the adjoint $A^H y$, as in
        `scipy.sparse.linalg.LinearOperator`, and not the transpose. For a symmetric map, give
        `matvec` again.
    - `out`, `vmap_method`: as for [`eqx_grads.host_function`][]. By default the output is like
        `x`.

    **Returns:**

    A function of `x` and the parameters.

    **Derivative:**

    With respect to `x`, the forward rule is $\dot y = A \dot x$ and the reverse rule
    $\bar x = A^T \bar y$. Both modes and all orders; `jax.linear_transpose` accepts the
    function, so that a rule may apply it to tangents. There is no derivative with respect to
    the parameters.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not floating or complex, or if a parameter is
    differentiated; and the errors of [`eqx_grads.host_function`][].
    """
    check_function(matvec, "matvec", "linear_host_function")
    check_function(rmatvec, "rmatvec", "linear_host_function")
    if not isinstance(vmap_method, str) or vmap_method not in VMAP_METHODS:
        raise rule_error(
            f"`linear_host_function` has no `vmap_method` {vmap_method!r}.",
            place_of(matvec),
            do=f"Use one of {', '.join(map(repr, VMAP_METHODS))}.",
        )
    function = LinearHostFunction(
        HostCode(matvec, out=out, vmap_method=vmap_method, is_linear=True),
        HostCode(rmatvec, vmap_method=vmap_method, is_linear=True, adjoint_of=name_of(matvec)),
    )
    set_metadata(function, matvec)
    return function
