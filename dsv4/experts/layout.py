"""ExpertLayout: one expert's codes and scales as one run of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

ALIGN = 256  # bytes; every part begins on a multiple, for whatever loads are widest


@dataclass(frozen=True)
class ExpertLayout:
    """Of w1, w2, w3 the codes uint8 [N, K/2] and then the scales uint8 [N, K/32]: the six shapes, a rank's part."""

    shapes: tuple[tuple[int, int], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each array begins."""
        found, at = [], 0
        for rows, columns in self.shapes:
            found.append(at)
            at += -(-rows * columns // ALIGN) * ALIGN
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Of a whole expert, gaps included."""
        return self.starts[-1] + -(-self.shapes[-1][0] * self.shapes[-1][1] // ALIGN) * ALIGN

    def arrays(self, data: Any) -> list[Any]:
        """The six arrays as views of uint8 [nbytes], NumPy's or a device's."""
        return [data[at : at + n * k].reshape(n, k) for at, (n, k) in zip(self.starts, self.shapes)]

    def matrices(self, ops: Any, data: Any) -> tuple[Any, Any, Any]:
        """(w1, w2, w3) over uint8 [nbytes]."""
        a = self.arrays(data)
        return tuple(ops.matrix("fp4", a[i], a[i + 1]) for i in (0, 2, 4))
