"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from .errors import ConfigError


def parse_size(name: str, text: str) -> int:
    """Bytes of "2GiB", "500 MB", "1.5g" (without a B: powers of 1024) or a plain number. Raises ConfigError naming `name`."""
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)\s*(?:([kmgt])(i?b)?|b)?", text.strip().lower())
    if match:
        base = 1000 if match[3] == "b" else 1024
        size = int(float(match[1]) * base ** " kmgt".index(match[2] or " "))
        if size >= 1:
            return size
    raise ConfigError(f"{name}: expected a size in bytes above 0, such as 2GiB or 500MB; found {text!r}")
