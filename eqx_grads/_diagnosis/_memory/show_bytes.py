"""A number of bytes as text, in KiB or MiB."""


def show_bytes(n: int | float) -> str:
    """Such as `1.5 MiB`."""
    if abs(n) < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB"):
        n /= 1024
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
    return f"{n / 1024:.3g} GiB"
