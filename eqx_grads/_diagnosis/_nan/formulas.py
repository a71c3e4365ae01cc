"""Which well-known formula an operation of a loss is a part of."""

import functools as ft
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ..._jaxprs.structure import Call, CallWithRule, Checkpoint, structure
from ..origins import is_in_derivative, Origin
from ..source_lines import UNKNOWN
from .groups import are_same_groups, group_of, is_of_own_group


# What may be between the operations of a formula.
_LAYOUT = frozenset(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose convert_element_type stop_gradient
    copy
    """.split()  # noqa: SIM905
)


# Of these, the ones that change neither the elements nor their derivative.
_UNCHANGED = ("convert_element_type", "copy")
_SUMS = ("reduce_sum", "dot_general")
# What may choose between the entries of a softmax before the logarithm.
_SELECTIONS = ("select_n", "gather", "slice", "dynamic_slice")
_OF_QUOTIENT = "derivative of a quotient"


class Formulas:
    """The operations of a loss, and which of them compute their operands, also across calls."""

    def __init__(self, origins: Sequence[Origin]):
        self._origins = origins
        self._producers: dict[Any, Origin] = {}
        self._arguments: dict[Any, Any] = {}
        for origin in origins:
            for v in origin.eqn.outvars:
                self._producers[origin.enclosing, v] = origin
            known = structure(origin.eqn)
            if isinstance(known, Call | CallWithRule | Checkpoint):
                inside = (*origin.enclosing, origin.number)
                inputs = known.programs[0].jaxpr.invars
                for inner, outer in zip(inputs, origin.eqn.invars, strict=True):
                    self._arguments[inside, inner] = (origin.enclosing, outer)

    def formula_of(self, origin: Origin) -> str:
        """The name of a formula, or an empty string."""
        match origin.primitive:
            case "exp":
                return self._formula_of_exp(origin)
            case "log":
                return self._formula_of_log(origin)
            case "sqrt":
                return self._formula_of_sqrt(origin)
            case "cosh" | "expm1" | "sinh":
                return self._formula_of_growth(origin)
            case "sub":
                return self._formula_of_shift(origin) if self._is_shifted(origin) else ""
            case "integer_pow":
                return self._formula_of_derivative(origin)
            case "mul":
                exps = [(self._made_by(origin, k), 1 - k) for k in (0, 1)]
                exps = [(e, k) for e, k in exps if e is not None and e.primitive == "exp"]
                is_same = any(self._is_same(exp, 0, origin, k) for exp, k in exps)
                return "exp(x) * x" if is_same else ""
            case "div" if formula := self._formula_of_derivative(origin):
                return formula
            case "div":
                above = self._made_by(origin, 0)
                if above is not None and above.primitive in ("expm1", "log1p", "sinh"):
                    return self._formula_of_ratio(above, origin)
                if above is not None and above.primitive == "sub" and self._is_one(above, 1):
                    exp = self._made_by(above, 0)
                    if exp is not None and exp.primitive == "exp":
                        is_same = self._is_same(exp, 0, origin, 1)
                        return "expm1(x) / x" if is_same else ""
                below = self._made_by(origin, 1)
                if below is not None and below.primitive == "abs":
                    return "x / |x|" if self._is_same(below, 0, origin, 0) else ""
                if below is not None and below.primitive == "sqrt":
                    is_norm = self._formula_of_sqrt(below) == "norm"
                    return "x / norm" if is_norm and self._is_norm_of(origin, below) else ""
        return ""

    def _formula_of_derivative(self, origin: Origin) -> str:
        """What the square root is a part of, of whose derivative JAX made this operation: in
        the gradient of a gradient, it is what is not finite."""
        root = self._root(origin)
        if not self.is_in_derivative(origin):
            return ""
        if root is not None and _place(root) == _place(origin):
            return self._formula_of_sqrt(root) or "sqrt"
        if origin.primitive != "integer_pow" or origin.eqn.params["y"] >= 0:
            return ""
        divisor = self._source(origin, 0)
        is_of_quotient = any(
            o.primitive == "div"
            and _place(o) == _place(origin)
            and self._source(o, 1) == divisor
            for o in self._origins
        )
        return _OF_QUOTIENT if is_of_quotient else ""

    def differentiated(self, origin: Origin) -> str:
        """The square root or the quotient of whose derivative, which the loss takes, JAX made
        this operation, or an empty string."""
        if origin.primitive not in ("div", "integer_pow"):
            return ""
        formula = self._formula_of_derivative(origin)
        if formula == _OF_QUOTIENT:
            return "div"
        return "sqrt" if formula else ""

    def is_in_derivative(self, origin: Origin) -> bool:
        """Whether it is in a derivative that the loss takes."""
        return is_in_derivative(self._origins, origin)

    def _root(self, origin: Origin) -> Origin | None:
        """The square root in `0.5 / sqrt(x)` and in `sqrt(x) ** -2`."""
        if origin.primitive == "integer_pow":
            k, is_formula = 0, origin.eqn.params["y"] < 0
        else:
            atom = origin.eqn.invars[0]
            k, is_formula = 1, isinstance(atom, Literal) and bool(atom.val == 0.5)
        root = self._made_by(origin, k) if is_formula else None
        return root if root is not None and root.primitive == "sqrt" else None

    def _formula_of_growth(self, origin: Origin) -> str:
        """What a `cosh`, `expm1` or `sinh` that overflows is a part of."""
        for user in self._users[origin.number]:
            if user.primitive == "log":
                return "" if origin.primitive == "sinh" else f"log of {origin.primitive}"
            if user.primitive == "div" and origin.primitive != "cosh":
                return self._formula_of_ratio(origin, user)
        return ""

    def _formula_of_ratio(self, above: Origin, quotient: Origin) -> str:
        is_same = self._is_same(above, 0, quotient, 1)
        return f"{above.primitive}(x) / x" if is_same else ""

    def _formula_of_exp(self, exp: Origin) -> str:
        users = self._users[exp.number]
        if any(user.primitive == "log1p" for user in users):
            return "softplus"
        for quotient in (user for user in users if user.primitive == "div"):
            total = self._made_by(quotient, 1)
            if total is not None and total.primitive == "reduce_sum":
                return "softmax" if self._is_sum_of(exp, total) else ""
        for total in users:
            of_sum = {"reduce_sum": ("logsumexp", "softmax")}
            in_log, in_quotient = of_sum.get(total.primitive) or self._formulas_of_add(total)
            for user in self._users[total.number]:
                if user.primitive == "log":
                    return in_log
                if user.primitive == "div" and self._made_by(user, 1) is total:
                    if in_quotient == "sigmoid":
                        return self._formula_of_sigmoid(exp, user)
                    above = self._made_by(user, 0)
                    if above is not None and above.primitive in _SUMS:  # a weighted mean
                        made = (self._made_by(above, k) for k in range(len(above.eqn.invars)))
                        above = next((m for m in made if self._has_factor_exp(m)), None)
                    is_of_same = self._has_factor_exp(above, exp)
                    return in_quotient if is_of_same else ""
        return ""

    def _formula_of_sigmoid(self, exp: Origin, quotient: Origin) -> str:
        """What a quotient by `1 + exp(x)` is."""
        if not self._is_one(quotient, 0):
            above = self._made_by(quotient, 0)
            is_of_same = above is not None and self._is_like(above, exp)
            return "sigmoid" if is_of_same else ""
        inner = self._made_by(exp, 0)
        is_negative = inner is not None and inner.primitive == "neg"
        return "sigmoid" if is_negative else "sigmoid of -x"

    def _is_like(self, exp: Origin, other: Origin) -> bool:
        """Whether both are an `exp` of the same."""
        are = exp.primitive == other.primitive == "exp"
        return are and (exp is other or self._source(exp, 0) == self._source(other, 0))

    def _is_sum_of(self, exp: Origin, total: Origin | None) -> bool:
        """Whether it is the sum of `exp(x)` with the `x` of an `exp`."""
        made = self._made_by(total, 0) if total and total.primitive == "reduce_sum" else None
        return made is not None and self._is_like(made, exp)

    def _formulas_of_add(self, total: Origin) -> tuple[str, str]:
        """What the logarithm of a sum with a term `exp(x)` is, and what a quotient by it is."""
        if total.primitive != "add":
            return "", ""
        if any(self._is_one(total, k) for k in (0, 1)):
            return "softplus", "sigmoid"
        made = [self._made_by(total, k) for k in (0, 1)]
        return "logaddexp" if all(m and m.primitive == "exp" for m in made) else "", ""

    def _formula_of_log(self, log: Origin) -> str:
        made = self._past_selections(self._made_by(log, 0))
        if made is None:
            return ""
        if made.primitive == "abs":  # `jax.nn.logsumexp` is also for numbers with a sign
            total = self._made_by(made, 0)
            exp = self._made_by(total, 0) if total and total.primitive == "reduce_sum" else None
            shift = self._made_by(exp, 0) if exp and exp.primitive == "exp" else None
            return "log of shifted sum" if shift and self._is_shifted(shift) else ""
        if made.primitive == "logistic":
            return "log of sigmoid"
        if made.primitive == "sub" and self._is_one(made, 0):
            below = self._made_by(made, 1)
            is_sigmoid = below is not None and below.primitive == "logistic"
            return "log of 1 - sigmoid" if is_sigmoid else ""
        below = self._made_by(made, 0)
        if below is not None and below.primitive == "exp" and made.primitive == "div":
            if not self._is_sum_of(below, self._made_by(made, 1)):
                return "log of product"
            return "entropy" if self._is_times_its_argument(log) else "log of softmax"
        if made.primitive == "div" and below is not None and below.primitive in _SUMS:
            made, below = below, self._made_by(below, 0)  # a mean
        if made.primitive == "reduce_prod" or self._has_factor_exp(made):
            return "log of product"
        if made.primitive not in _SUMS:
            return ""
        if below is not None and below.primitive == "exp" and made.primitive == "reduce_sum":
            return "logsumexp"
        terms = [self._made_by(made, k) for k in range(len(made.eqn.invars))]
        if any(map(self._has_factor_softmax, terms)):
            return "log of chosen softmax"
        return "log of weighted exp" if any(map(self._has_factor_exp, terms)) else ""

    def _is_times_its_argument(self, log: Origin) -> bool:
        """Whether `log(p)` is multiplied by `p` or `-p` only: for the sum of `-p * log(p)`."""
        users = self._users[log.number]
        p = self._source(log, 0)

        def is_p(product: Origin, k: int) -> bool:
            made = self._made_by(product, k)
            if made is not None and made.primitive == "neg":
                return p == self._source(made, 0)
            return p == self._source(product, k)

        products = ("mul", "dot_general")
        return bool(users) and all(
            user.primitive in products and (is_p(user, 0) or is_p(user, 1)) for user in users
        )

    def _past_selections(self, made: Origin | None) -> Origin | None:
        """What an operation selects from, if that is what it does."""
        while made is not None and made.primitive in _SELECTIONS:
            # Of a `where`, the branch that is computed. The other one is mostly a constant.
            branches = range(1, 3) if made.primitive == "select_n" else range(1)
            chosen = (self._made_by(made, k) for k in branches)
            made = next(filter(None, chosen), None)
        return made

    def _has_factor_softmax(self, made: Origin | None) -> bool:
        """Whether it is `exp(x) / sum(exp(x))`, some of its entries, or a product with it."""
        made = self._past_selections(made)
        if made is None or made.primitive not in ("mul", "div"):
            return False
        above, below = self._made_by(made, 0), self._made_by(made, 1)
        if made.primitive == "mul":
            return self._has_factor_softmax(above) or self._has_factor_softmax(below)
        return above is not None and self._is_sum_of(above, below)

    def _has_factor_exp(self, made: Origin | None, like: Origin | None = None) -> bool:
        """Whether it is `exp(x)`, or a product or quotient with it above. If another `exp` is
        given, that of the same `x`."""
        if made is None or made.primitive == "exp":
            return made is not None and (like is None or self._is_like(made, like))
        factors = {"mul": (0, 1), "div": (0,)}.get(made.primitive, ())
        return any(self._has_factor_exp(self._made_by(made, k), like) for k in factors)

    def _formula_of_shift(self, shift: Origin) -> str:
        """What an `x - max(x)` is a part of."""
        users = self._users[shift.number]
        exps = [user for user in users if user.primitive == "exp"]
        if exps and any(
            user.primitive == "sub"
            and self._made_by(user, 0) is shift
            and self._is_log_of_sum(exps, self._made_by(user, 1))
            for user in users
        ):
            return "shift of log_softmax"
        quotients = [user for exp in exps for user in self._users[exp.number]]
        for user in quotients:
            if user.primitive == "div" and self._is_sum_of(exps[0], self._made_by(user, 1)):
                return "shift of softmax"
        totals = [user for user in quotients if user.primitive == "reduce_sum"]
        logs = [user for total in totals for user in self._users[total.number]]
        return "log of shifted sum" if any(user.primitive == "log" for user in logs) else ""

    def _is_log_of_sum(self, exps: Sequence[Origin], log: Origin | None) -> bool:
        total = self._made_by(log, 0) if log and log.primitive == "log" else None
        return any(self._is_sum_of(exp, total) for exp in exps)

    def _is_shifted(self, shift: Origin) -> bool:
        """Whether it is `x - max(x)`, as in `jax.nn.softmax` and `jax.nn.logsumexp`."""
        top = self._made_by(shift, 1) if shift.primitive == "sub" else None
        if top is not None and top.primitive == "select_n":  # zero if the maximum is infinite
            top = self._made_by(top, 2)
        if top is not None and top.primitive == "max":  # with -inf, for an empty axis
            top = self._made_by(top, 1)
        if top is None or top.primitive != "reduce_max":
            return False
        return self._source(top, 0) == self._source(shift, 0)

    def _formula_of_sqrt(self, sqrt: Origin) -> str:
        total = self._made_by(sqrt, 0)
        if total is not None and total.primitive == "select_n":  # `jnp.var` checks the size
            total = self._made_by(total, 2)
        if total is not None and total.primitive == "div":
            squares = self._made_by(total, 0)
            if squares is None or not self._is_sum_of_squares(squares):
                return ""
            if self._is_of_centered(squares):
                return "deviation"
            is_mean = isinstance(self._source(total, 1)[1], Literal)
            return "rms" if is_mean else ""
        if total is not None and total.primitive == "add":
            made = [self._made_by(total, k) for k in (0, 1)]
            return "length" if all(m is not None and self._is_square(m) for m in made) else ""
        return "norm" if total is not None and self._is_sum_of_squares(total) else ""

    def _is_of_centered(self, total: Origin) -> bool:
        """Whether a sum of squares is that of `x - mean(x)`, with means of the same axes."""
        square = self._made_by(total, 0) if total.primitive == "reduce_sum" else None
        x = self._made_by(square, 0) if square is not None else None
        if x is None or square is None or x.primitive != "sub":
            return False
        mean = self._made_by(x, 1)
        above = self._made_by(mean, 0) if mean is not None and mean.primitive == "div" else None
        if mean is None or above is None or above.primitive != "reduce_sum":
            return False
        if self._source(above, 0) != self._source(x, 0):
            return False
        group = group_of(above, self._path(above, 0))
        _, number = self._source(mean, 1)
        if not isinstance(number, Literal) or number.val != group.size:
            return False
        to_mean = [*self._path(mean, 0), *self._path(x, 1)]
        is_centered = is_of_own_group(group, self._path(x, 0), to_mean)
        through = [*self._path(square, 0), *self._path(total, 0)]
        return is_centered and not through and are_same_groups(total, to_mean, above)

    def _is_norm_of(self, origin: Origin, norm: Origin) -> bool:
        """Whether operand 0 is what the norm is that of, or a multiple of it, and not, for
        example, its sine, and each element is divided by the norm of its own vector."""
        total = self._made_by(norm, 0)
        is_product = total is not None and total.primitive == "dot_general"
        square = total if is_product else total and self._made_by(total, 0)
        if square is None or total is None:
            return False
        made = self._made_by(origin, 0)
        factors = [] if made is None or made.primitive != "mul" else [(made, 0), (made, 1)]
        for place in [(origin, 0), *factors]:
            if self._source(square, 0) == self._source(*place):
                if is_product:
                    return True
                through = [] if place[0] is origin else self._path(origin, 0)
                own = [*self._path(*place), *through]
                group = group_of(total, [*self._path(square, 0), *self._path(total, 0)])
                to_norm = [*self._path(norm, 0), *self._path(origin, 1)]
                return is_of_own_group(group, own, to_norm)
        return False

    def _is_sum_of_squares(self, total: Origin) -> bool:
        if total.primitive == "dot_general":
            (ours, theirs), (batch, others_batch) = total.eqn.params["dimension_numbers"]
            is_whole = len(ours) + len(batch) == total.eqn.invars[0].aval.ndim
            is_same = (*ours, *batch) == (*theirs, *others_batch)  # no matrix product
            return is_same and is_whole and self._is_same(total, 0, total, 1)
        made = self._made_by(total, 0) if total.primitive == "reduce_sum" else None
        return made is not None and self._is_square(made)

    def _is_square(self, made: Origin) -> bool:
        if made.primitive == "mul":
            return self._is_same(made, 0, made, 1)
        is_power = made.primitive == "integer_pow"
        return made.primitive == "square" or (is_power and made.eqn.params["y"] == 2)

    def is_made_by(self, user: Origin, origin: Origin, through: Collection[str]) -> bool:
        """Whether an operation is given the result of another one, or what operations of
        certain names make of it."""
        todo, seen = [user], set()
        while todo:
            one = todo.pop()
            for k in range(len(one.eqn.invars)):
                made = self._made_by(one, k)
                if made is None or made.number in seen:
                    continue
                if made.number == origin.number:
                    return True
                seen.add(made.number)
                if made.primitive in through:
                    todo.append(made)
        return False

    def _made_by(self, origin: Origin, k: int) -> Origin | None:
        """The operation that computes operand `k`, past changes of layout."""
        enclosing, atom = self._source(origin, k)
        return None if isinstance(atom, Literal) else self._producers.get((enclosing, atom))

    def _is_one(self, origin: Origin, k: int) -> bool:
        _, atom = self._source(origin, k)
        return isinstance(atom, Literal) and bool(atom.val == 1)

    def _is_same(self, one: Origin, k: int, other: Origin, i: int) -> bool:
        """Whether two operands are the same array, and not one with another layout, such as
        the transposed one."""
        if self._source(one, k) != self._source(other, i):
            return False
        ours, theirs = (
            [(e.primitive.name, str(e.params)) for e in self._path(*place)]
            for place in ((one, k), (other, i))
        )
        return ours == theirs

    def _path(self, origin: Origin, k: int) -> list[Any]:
        """The equations that change the layout between the source of operand `k` and it, from
        the first to the last."""
        return self._walk(origin, k)[1]

    def _source(self, origin: Origin, k: int) -> tuple[Any, Any]:
        """The variable that operand `k` is, past changes of layout, and the calls around it."""
        return self._walk(origin, k)[0]

    def _walk(self, origin: Origin, k: int) -> tuple[tuple[Any, Any], list[Any]]:
        place, path = (origin.enclosing, origin.eqn.invars[k]), []
        while True:
            enclosing, atom = place
            if isinstance(atom, Literal):
                return place, path[::-1]
            if place in self._arguments:
                place = self._arguments[place]
                continue
            made = self._producers.get(place)
            if made is None:
                return place, path[::-1]
            known = structure(made.eqn)
            if isinstance(known, Call | CallWithRule | Checkpoint):
                out = known.programs[0].jaxpr.outvars[made.eqn.outvars.index(atom)]
                place = ((*enclosing, made.number), out)
            elif made.eqn.primitive.name in _LAYOUT:
                place = (enclosing, made.eqn.invars[0])
                if made.eqn.primitive.name not in _UNCHANGED:
                    path.append(made.eqn)
            else:
                return place, path[::-1]

    @ft.cached_property
    def _users(self) -> dict[int, list[Origin]]:
        """For each operation, by number, those that use its result."""
        users: dict[int, list[Origin]] = defaultdict(list)
        for origin in self._origins:
            if origin.eqn.primitive.name in _LAYOUT or structure(origin.eqn) is not None:
                continue
            for k in range(len(origin.eqn.invars)):
                made = self._made_by(origin, k)
                if made is not None:
                    users[made.number].append(origin)
        return users


def _place(origin: Origin) -> tuple[Any, ...]:
    source = origin.source
    return source.file, source.line, source.column, source.calls


def formula_in(program: ClosedJaxpr, eqn: Any) -> str:
    """The formula that an equation of any program is a part of, such as one in a rule."""
    eqns = enumerate(program.jaxpr.eqns)
    origins = [Origin(i, e, e.primitive.name, UNKNOWN, "", (), ()) for i, e in eqns]
    formulas = Formulas(origins)
    return next((formulas.formula_of(o) for o in origins if o.eqn is eqn), "")
