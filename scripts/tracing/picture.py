"""A picture of an array: what is kept of it, and its heat map as a PNG."""

import math
import struct
import zlib
from typing import NamedTuple

import numpy as np

CELLS = 64  # of a picture, at most, each way
LEVELS = 31  # shades of each sign
POSITIVE, NEGATIVE, NOT_FINITE = (0x2F, 0x8F, 0x4E), (0x9A, 0x6B, 0xD0), (0x8A, 0x8A, 0x8A)


class Snapshot(NamedTuple):
    """What is kept of an array: everything, unless it is large."""

    shape: tuple[int, ...]
    panels: np.ndarray  # (panels, rows, columns)
    block: tuple[int, int]  # rows and columns of the array that one cell stands for
    norm: float
    largest: float  # magnitude, among the finite
    is_complex: bool  # the real and the imaginary part of each number stand side by side


def snapshot(array: np.ndarray) -> Snapshot:
    """Copy an array, as matrices along its first axis: of 3 or more axes longer than 1, one for each index of that.

    Of a matrix too large for a picture, each cell is the element of largest magnitude in a block.
    """
    parts = array
    if array.dtype.kind == "c":
        parts = np.ascontiguousarray(array).view(array.real.dtype)
    long = [n for n in parts.shape[:-1] if n > 1]
    columns = parts.shape[-1] if parts.ndim else 1
    panels = parts.reshape(long[0] if len(long) > 1 else 1, -1, columns)
    block = math.ceil(panels.shape[1] / CELLS), math.ceil(columns / CELLS)
    finite = parts[np.isfinite(parts)].astype(float)
    largest = float(np.max(np.abs(finite), initial=0))
    return Snapshot(
        array.shape,
        np.stack([shrunk(panel, *block) for panel in panels]),
        block,
        float(np.linalg.norm(finite)),
        largest,
        array.dtype.kind == "c",
    )


def shrunk(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return a copy with the element of largest magnitude of each block of so many rows and columns."""
    if rows == columns == 1:
        return matrix.copy()
    height, width = math.ceil(matrix.shape[0] / rows), math.ceil(matrix.shape[1] / columns)
    filled = np.zeros((height * rows, width * columns), matrix.dtype)  # no zero is the largest, or all are
    filled[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = filled.reshape(height, rows, width, columns).swapaxes(1, 2).reshape(height, width, -1)
    return np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]


def png(matrix: np.ndarray, largest: float) -> bytes:
    """Return a picture of a matrix, a pixel an element, from purple at -largest to green at +largest.

    Zero is transparent, so that it has the colour of the page, dark or light. What isn't finite is grey.
    """
    share = np.divide(matrix, largest, dtype=float) if largest else np.zeros(matrix.shape)
    grey = ~np.isfinite(matrix)
    cells = np.where(grey, 2 * LEVELS + 1, LEVELS + np.rint(LEVELS * np.where(grey, 0, share))).astype(np.uint8)
    colours = [*[NEGATIVE] * LEVELS, *[POSITIVE] * (LEVELS + 1), NOT_FINITE]
    opacity = [round(255 * abs(i - LEVELS) / LEVELS) for i in range(2 * LEVELS + 1)] + [255]
    rows, columns = cells.shape
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),  # 8 bits, a palette
            chunk(b"PLTE", np.array(colours, np.uint8).tobytes()),
            chunk(b"tRNS", bytes(opacity)),
            chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in cells), 9)),
            chunk(b"IEND", b""),
        ]
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a part of a PNG file: its length, kind, data and checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
