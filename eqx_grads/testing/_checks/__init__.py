"""The checks that `check_rule` consists of, one file each."""
