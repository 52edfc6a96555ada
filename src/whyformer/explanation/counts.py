"""Format counts and sizes."""


def amount(count: int, noun: str) -> str:
    """``amount(1, "map")`` is "1 map", ``amount(4812, "word")`` is "4,812 words"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_bytes(number: float) -> str:
    """``in_bytes(2.1e9)`` is "2.1 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
