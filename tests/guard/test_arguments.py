"""A wrong argument is an error that names it, or has a right answer: `tests/hostile` has the
public functions and layers, with what each argument may be."""

import zlib

import pytest

from ..test_hostile_input import _no_type_checks, faults, hostile  # noqa: F401  as users run it


pytestmark = pytest.mark.quick


# What tells a check that is missing; `test_hostile_input` has all kinds, which are slow tests.
TELLING = (
    "none", "string", "function", "negative", "zero", "fraction", "nan", "some floats",
    "one axis more", "one longer", "integers", "complex array", "misspelled",
)  # fmt: skip
PARTS = 4


def _some_kinds(target, argument):
    """Other kinds for other arguments, and the same in every run."""
    return sorted(TELLING, key=lambda kind: zlib.crc32(f"{target}{argument}{kind}".encode()))[
        :4
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_wrong_arguments(part):
    staged = [name for name, target in hostile().TARGETS.items() if not target.is_eager]
    assert not faults(staged[part::PARTS], _some_kinds)
