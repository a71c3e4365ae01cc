"""`linear_host_function`: a linear map that runs on the host, with its adjoint."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import check_function, check_option, rule_error, show_path, type_of
from .._jaxprs.varying import vary_alike, varying_types
from .._rules.linear_primitive import apply_side, Side
from .._rules.wrapper import reduce_by_name, set_metadata
from .._tangent_spaces import is_differentiable
from .._trees import mirror_of
from .derivative import host_call, tangent_type
from .host_call import host_call_of, HostCode
from .host_callback import VMAP_METHODS
from .promised_types import without_memory


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
        - `args`: parameters: any PyTrees, which both functions get.

        **Returns:**

        The output of `matvec`, as JAX arrays of the promised types.
        """
        _check_inexact(self._matvec, x)
        call, operands = host_call_of(self._matvec, (x, *args), {}, None, [self._rmatvec.fn])
        leaves, treedef = jax.tree.flatten(x)
        n = len(leaves)
        in_types = call.in_types[:n]

        def matvec(parameters, xs):
            return host_call(call.op, [*xs, *parameters])

        def rmatvec(parameters, cts):
            # The transpose is the conjugate of the adjoint of the conjugate.
            like = without_memory(in_types)
            (_, *given), _ = call.split.tree([*like, *parameters])
            ct = jax.tree.unflatten(call.out_treedef, [jnp.conj(ct) for ct in cts])
            out = mirror_of(treedef, in_types, like)
            adjoint, operands = host_call_of(self._rmatvec, (ct, *given[: len(args)]), {}, out)
            return [jnp.conj(x) for x in host_call(adjoint.op, operands)]

        # Inside `shard_map`, the transpose of the cast sums the cotangents of the devices.
        operands = vary_alike(operands)
        types_of = lambda types: varying_types(map(tangent_type, types), operands)
        pair = (
            Side(self._matvec.name, matvec, types_of(call.out_types)),
            Side(self._rmatvec.name, rmatvec, types_of(in_types)),
        )
        outs = apply_side(*pair, operands[n:], operands[:n])
        return jax.tree.unflatten(call.out_treedef, outs)

    def __reduce__(self):
        return reduce_by_name(self, self._matvec.fn)

    def __repr__(self):
        return f"<eqx_grads.linear_host_function of {self._matvec.name}>"


def _check_inexact(code: HostCode, x: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not is_differentiable(leaf):
            what = f"`{code.name}` is linear in its first argument, which has to be floating "
            raise rule_error(
                what + "or complex.",
                f"at `{code.signature.names[0]}{show_path(path)}`: {type_of(leaf)}",
                code.place,
                do="Cast it, or pass it as one of the parameters after the first argument.",
            )


def linear_host_function(
    matvec: Any,
    rmatvec: Any,
    *,
    out: PyTree | Callable[..., PyTree] = None,
    vmap_method: str = "sequential",
) -> LinearHostFunction:
    r"""Make a linear map that JAX can't trace from two functions: the map and its adjoint.

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
    - `rmatvec`: called as `rmatvec(y, *args)`, where `y` is like the output; returns a tree
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
    function, so that a rule may apply it to tangents. The parameters have no derivative.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not floating or complex, or if a parameter is
    differentiated; and the errors of [`eqx_grads.host_function`][].
    """
    check_function(matvec, "matvec", "linear_host_function")
    check_function(rmatvec, "rmatvec", "linear_host_function")
    check_option("linear_host_function", "vmap_method", vmap_method, VMAP_METHODS)
    out = (lambda x, *_: x) if out is None else out
    function = LinearHostFunction(
        HostCode(matvec, vmap_method, out, is_linear=True),
        HostCode(rmatvec, vmap_method, is_linear=True),
    )
    set_metadata(function, matvec)
    return function
