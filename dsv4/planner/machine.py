"""The machine: memories and the roads between them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from ..errors import ConfigError

GIB, GB = 1 << 30, 1e9
PCIE = {3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}  # GB/s of 16 lanes one way, by generation
# Assumed: what a program gets of the hardware's figures, and what time goes by beside reading.
GPU_SHARE = 0.7
PCIE_SHARE = 0.8
HOST_SHARE = 0.65
LAYER_MS = 0.2  # launches, exchanges and small operations: nano's on a CPU (docs/measurements); on a GPU a guess
GPU_DRIVER, HOST_RESERVE = 1.0 * GIB, 8 * GIB  # the driver, compiled kernels, NCCL; system and other programs


@dataclass(frozen=True)
class Machine:
    """Gibibytes of memory, 10^9 bytes a second of bandwidth. gpus = 0: the processor computes.

    gpu_memory, gpu_bandwidth and the PCIe link (its generation, and lanes) are each GPU's; bandwidth is host memory's.
    Raises ConfigError for what no machine has.
    """

    gpus: int = 0
    gpu_memory: float = 0.0
    ram: float = 256.0
    pcie: int = 4
    lanes: int = 16
    bandwidth: float = 100.0
    gpu_bandwidth: float = 600.0
    disk: float = 3.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("gpus", "gpu_memory") else 1e-3
            if not math.isfinite(value) or value < least:
                raise ConfigError(f"plan: {field.name}: expected a number of at least {least:g}, found {value!r}")
        if self.pcie not in PCIE:
            raise ConfigError(f"plan: pcie: expected a generation, {', '.join(map(str, PCIE))}; found {self.pcie}")
        if self.lanes not in (1, 2, 4, 8, 16):
            raise ConfigError(f"plan: lanes: expected 1, 2, 4, 8 or 16; found {self.lanes}")

    @property
    def link(self) -> float:
        """Bytes a second that a program gets from the host to one GPU."""
        return PCIE[self.pcie] * self.lanes / 16 * PCIE_SHARE * GB

    @property
    def host(self) -> float:
        """Bytes a second that a program reads of host memory."""
        return self.bandwidth * HOST_SHARE * GB

    @property
    def device(self) -> float:
        """Bytes a second that kernels read of one GPU's memory."""
        return self.gpu_bandwidth * GPU_SHARE * GB


def parse_gpus(text: str) -> tuple[int, float]:
    """(count, gibibytes of each) of "4x22"; "0" is none. Raises ConfigError."""
    if text.strip() == "0":
        return 0, 0.0
    match = re.fullmatch(r"([1-9]\d{0,8})x(\d{1,9}(?:\.\d+)?)", text.strip().lower())
    if not match or float(match[2]) == 0:
        raise ConfigError(f"--gpus: expected COUNTxGIB, such as 4x22, or 0 for none; found {text!r}")
    return int(match[1]), float(match[2])
