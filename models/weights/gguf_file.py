"""A GGUF file: metadata as plain Python values, tensors by name.

The header is read here and not by the gguf package, whose reader takes seconds for a header of 100,000 strings and
believes every size that a damaged file claims. Dequantising is the package's.

Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md).
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_DIMS = 4
_UINT64 = struct.Struct("<Q")
_DTYPES = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, not yet read.

    Attributes:
      shape: [out, in] for a weight (the file itself lists dimensions innermost first).
      type: how its numbers are stored.
      data: uint8 [..., bytes of one row], a read-only view of the file.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file; the mapping lives as long as this object or any tensor's data.

    Attributes:
      path: where it is.
      metadata: the file's keys and values as Python numbers, strings and lists.
      tensors: by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Reads the header and maps the tensors; a size that the file claims is held against the file's own first.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a GGUF file, or it is damaged or cut short.
        """
        try:
            content = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
            metadata, tensors = _parse(content)
        except ValueError as error:
            raise ValueError(
                f"{path} is not a GGUF file of version 2 or 3, or it is damaged or cut short ({error}); get it again"
            ) from error
        return cls(path, metadata, tensors)


class _Reader:
    """Takes values from the front of the file, one after another; raises ValueError rather than pass its end."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = memoryview(content)
        self.offset = 0

    def take(self, size: int) -> memoryview:
        start = self.offset
        if size > len(self._content) - start:
            raise ValueError(f"{size} bytes are wanted at byte {start}, but the file ends at {len(self._content)}")
        self.offset = start + size
        return self._content[start : self.offset]

    def uint32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def uint64(self) -> int:
        return _UINT64.unpack(self.take(8))[0]

    def strings(self, count: int) -> list[str]:
        """As one loop: a vocabulary and its merges are most of a header."""
        found, offset, end = [], self.offset, len(self._content)
        for _ in range(count):
            start = offset + 8
            offset = start + _UINT64.unpack_from(self._content, offset)[0] if start <= end else start
            if offset > end:
                raise ValueError(f"a string of the header ends at byte {offset}, but the file at {end}")
            found.append(str(self._content[start:offset], "utf-8"))
        self.offset = offset
        return found

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_DTYPES[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.strings(1)[0]
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(kind, 1)[0]
        item_kind, count = GGUFValueType(self.uint32()), self.uint64()
        if item_kind is GGUFValueType.ARRAY:
            raise ValueError("an array of arrays is not supported")
        if item_kind is GGUFValueType.STRING:
            return self.strings(count)
        return self.numbers(item_kind, count)


def _parse(content: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    reader = _Reader(content)
    if bytes(reader.take(4)) != _MAGIC or reader.uint32() not in _VERSIONS:
        raise ValueError("it does not start as one")
    num_tensors, num_keys = reader.uint64(), reader.uint64()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        (key,) = reader.strings(1)
        if key in metadata:
            raise ValueError(f"the key {key!r} is there twice")
        metadata[key] = reader.value(GGUFValueType(reader.uint32()))
    headers = [_tensor_header(reader) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment must be a positive integer, got {alignment!r}")
    start = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    left = len(content) - start
    for name, shape, kind, offset in headers:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // block * block_bytes
        size = math.prod(shape[:-1]) * row_bytes
        left -= size  # also no two tensors may claim the same bytes
        if left < 0 or start + offset + size > len(content):
            raise ValueError(f"tensor {name!r} ends past the file's end at byte {len(content)}")
        if name in tensors:
            raise ValueError(f"the tensor {name!r} is there twice")
        data = content[start + offset : start + offset + size].reshape(*shape[:-1], row_bytes)
        tensors[name] = GGUFTensor(shape, kind, data)
    return metadata, tensors


def _tensor_header(reader: _Reader) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    (name,), num_dims = reader.strings(1), reader.uint32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(reversed(reader.numbers(GGUFValueType.UINT64, num_dims)))
    kind, offset = GGMLQuantizationType(reader.uint32()), reader.uint64()
    block, _ = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"tensor {name!r} cannot have the shape {list(shape)} as {kind.name}")
    return name, shape, kind, offset
