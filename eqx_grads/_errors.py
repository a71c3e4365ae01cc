"""How this library phrases an error: what happened, where, and what to do."""

import dataclasses
import functools as ft
import importlib
import inspect
import pathlib
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

import equinox as eqx
import jax
import numpy as np

from ._trees import mirror, name_of_key, one_level


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


class RuleError(TypeError, ValueError, RuntimeError):
    """A rule, or a call of a function with a rule, breaks the contract of rules.

    The message has three parts: what happened, where (the rule, its file and line, and
    the leaf in the names of your own parameters), and what to do about it. It is raised while
    JAX traces your program, never while a compiled program runs. There is one exception:
    the result of a host function is known only when the program runs.

    It is a `TypeError`, which is what JAX raises for a wrong rule, and both a
    `ValueError` and a `RuntimeError`, which are what Equinox raises.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        @eqg.custom_jvp
        def double(x):
            return 2 * x

        try:
            jax.grad(double)(1.0)
        except eqg.RuleError as error:
            assert "`double` has no forward rule" in str(error)
        ```
    """

    # Whether the error says that a value must not be differentiated.
    forbids_derivative = False


def rule_error(what: str, *where: str, do: str) -> RuleError:
    """A `RuleError` in three parts; each line of `where` is indented."""
    return RuleError("\n".join([what, *("  " + line for line in where), do]))


def bad_argument(caller: str, argument: str, wanted: str, x: Any, do: str) -> RuleError:
    """The error of an argument of a public function that is not what the function takes."""
    what = f"The `{argument}` of `{caller}` is not {wanted}."
    shown = type_of(x) if hasattr(x, "dtype") else f"{x!r:.60}"
    return rule_error(what, f"it is {shown}", do=do)


def check_option(caller: str, option: str, x: Any, known: Collection[str]) -> None:
    """Raise unless `x` is one of the words that an option of a public function takes."""
    if not isinstance(x, str) or x not in known:
        do = f"Give one of {', '.join(map(repr, known))}."
        raise bad_argument(caller, option, "known", x, do)


def is_pair(result: Any) -> TypeGuard[tuple[Any, Any]]:
    return isinstance(result, tuple | list) and len(result) == 2


def pair_of(result: Any, what: str, place: str, do: str) -> tuple[Any, Any]:
    """The pair that `what`, a function of the user, returned, or an error."""
    if is_pair(result):
        return result
    returned = f"it returned {show_tree(result)}"
    raise rule_error(f"{what} did not return a pair.", returned, place, do=do)


def check_function(fn: Any, argument: str, caller: str) -> None:
    """Raise an error if an argument of a public function is not a function."""
    if not callable(fn):
        raise rule_error(
            f"The `{argument}` of `{caller}` is not a function.",
            f"it is {type_of(fn)}",
            do="Give a function, or a Module that can be called.",
        )


def check_flags(name: str, **flags: Any) -> None:
    """Raise unless each option is a bool. Any other object would count as true, `"no"` too."""
    for option, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise bad_argument(name, option, "a bool", flag, "Give `True` or `False`.")


def optional_import(module: str, user: str, extra: str = "solvers") -> Any:
    """A module of one of the extras of this library, which `user` needs, or an error that says
    how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`{user}` needs `{module}`, which can't be imported: {error}.\n"
            f"  `{module}` belongs to the extra `{extra}` of this library\n"
            f"Run `pip install eqx-grads[{extra}]`.",
            name=error.name,
        ) from None


def unpartial(fn: Any) -> Any:
    while isinstance(fn, ft.partial):
        fn = fn.func
    return fn


def name_of(fn: Any) -> str:
    """What the user calls `fn`."""
    fn = unpartial(fn)
    if isinstance(fn, eqx.filter_custom_vjp):  # of a `filter_custom_jvp`, it is not known
        fn = getattr(fn, "fn", fn)
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    if not isinstance(name, str):
        name = type(fn).__qualname__
    return name.rpartition("<locals>.")[2]


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_LIBRARY = str(pathlib.Path(__file__).parents[0])


def place_of(fn: Any) -> str:
    """`name, file, line` of a function of the user's, as far as Python knows them."""
    name, code = name_of(fn), code_of(fn)
    if code is None or code.co_filename.startswith(_LIBRARY):
        return f"in `{name}`"
    return f'in `{name}`, file "{code.co_filename}", line {code.co_firstlineno}'


def code_of(fn: Any) -> types.CodeType | None:
    """The code that the user wrote, if Python knows it."""
    fn = unpartial(fn)
    fn = inspect.unwrap(fn) if callable(fn) else fn
    fn = getattr(fn, "__func__", fn)
    # A copy of a function that wraps another one does not lead to it (`closure_convert.py`).
    return getattr(fn, "_eqg_code", None) or getattr(fn, "__code__", None)


# Where a wrapper of this package, or a bound method, has the function that users know.
_HIDDEN_FIELDS = tuple(jax.tree_util.GetAttrKey(name) for name in ("_eqg_fn", "__self__"))


def show_path(path: Sequence[Any]) -> str:
    """The path of a leaf as the user would write it, such as `.layers[0].weight`, even if
    `layers[0]` is wrapped in `filter_checkpoint`."""
    return jax.tree_util.keystr(tuple(key for key in path if key not in _HIDDEN_FIELDS))


def type_of(x: Any) -> str:
    """The type of a leaf as JAX writes it (`float32[3]`), or its Python type."""
    if x is None:
        return "None"
    # The classes of NumPy's numbers have these attributes, too.
    if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return f"{type(x).__name__} ({x!r:.60})"


class _Type:
    def __init__(self, x):
        self._text = type_of(x)

    def __repr__(self):
        return self._text


def show_tree(tree: Any) -> str:
    """The structure of a PyTree, with types instead of arrays."""
    is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    shown = mirror(lambda x: _Type(x) if is_array(x) else x, tree, is_leaf=is_array)
    return eqx.tree_pformat(shown, width=80)


def unlike(
    wanted: Any, given: Any, name: str, text: str, kind: Callable[[Any], Any]
) -> list[str]:
    """Where two trees differ, up to five lines: `text` with the types of both leaves, whose
    `kind` is not the same. `name` is what the user calls the trees."""
    # `None` is a leaf here: where a tree has one instead of an array, it is named.
    leaves = ft.partial(jax.tree_util.tree_leaves_with_path, is_leaf=lambda x: x is None)
    wants, has = dict(leaves(wanted)), dict(leaves(given))
    kind_of = lambda leaves, path: None if leaves.get(path) is None else kind(leaves[path])
    shown = lambda leaves, path: type_of(leaves[path]) if path in leaves else "not there"
    lines = [
        f"at {name}{show_path(path)}: " + text.format(shown(wants, path), shown(has, path))
        for path in {**wants, **has}
        if kind_of(wants, path) != kind_of(has, path)
    ]
    if not lines and jax.tree.structure(wanted) != jax.tree.structure(given):
        path, want, have = _first_difference(wanted, given)
        return [f"at {name}{path}: " + text.format(want, have)]
    return lines[:5]


def _first_difference(a: Any, b: Any) -> tuple[str, str, str]:
    """Where the containers of two trees first differ, and what each tree has there."""
    (keys, below_a, top_a), (_, below_b, top_b) = one_level(a), one_level(b)
    pairs = zip(keys, below_a, below_b, strict=True) if top_a == top_b else ()
    for key, x, y in pairs:
        if jax.tree.structure(x) != jax.tree.structure(y):
            path, want, have = _first_difference(x, y)
            return show_path((key,)) + path, want, have
    if type(a) is type(b) and dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            x, y = (repr(getattr(tree, field.name, None)) for tree in (a, b))
            if field.name not in map(name_of_key, keys) and x != y:
                return f".{field.name}", f"{x:.60}", f"{y:.60}, a static field"
    want, have = show_tree(a), show_tree(b)
    if want == have:  # a class of the user's with other static data, which JAX writes
        treedefs = (getattr(x, "_treedef", jax.tree.structure(x)) for x in (a, b))
        want, have = (f"{treedef!s:.200}" for treedef in treedefs)
    return "", want, have
