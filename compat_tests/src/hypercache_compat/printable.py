"""What others say, with all escaped that is no letter."""

from __future__ import annotations


def printable(text: str, *, kept: str = "") -> str:
    """The text with all escaped but letters and what is in `kept`: what a peer says must not reach a terminal
    as commands, and XML has no way to write most control characters."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter in kept or letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text
    )
