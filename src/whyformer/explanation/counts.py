"""How many of something, in words."""


def amount(count: int, noun: str) -> str:
    """``amount(1, "map")`` is "1 map", ``amount(4812, "word")`` is "4,812 words"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
