"""How an error is phrased, and the trees of texts that it shows."""

from .messages import (
    bad_argument as bad_argument,
    check_flags as check_flags,
    check_function as check_function,
    check_option as check_option,
    code_of as code_of,
    first_line as first_line,
    is_pair as is_pair,
    name_of as name_of,
    optional_import as optional_import,
    pair_of as pair_of,
    place_of as place_of,
    rule_error as rule_error,
    RuleError as RuleError,
    show_path as show_path,
    show_tree as show_tree,
    type_of as type_of,
    unlike as unlike,
    unpartial as unpartial,
)
