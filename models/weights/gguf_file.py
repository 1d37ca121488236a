"""A GGUF file as `gguf.GGUFReader` sees it: metadata as plain Python values, tensors by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, not yet read.

    Attributes:
      shape: [out, in] for a weight (the file itself lists dimensions innermost first).
      type: how its numbers are stored.
      data: [..., numbers or bytes of one row], a read-only view of the file.
    """

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: NDArray[Any]


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
        """Reads the header and maps the tensors.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a GGUF file, or it is damaged or cut short.
        """
        try:
            reader = GGUFReader(path)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError) as error:  # what GGUFReader raises at bytes that make no sense
            raise ValueError(
                f"{path} is not a GGUF file of version 2 or 3, or it is damaged or cut short ({error}); get it again"
            ) from error
        tensors = {
            tensor.name: GGUFTensor(
                tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type, tensor.data.view(np.ndarray)
            )
            for tensor in reader.tensors
        }
        return cls(path, metadata, tensors)
