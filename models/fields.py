"""The metadata of a checkpoint, from JSON or not: values with the types that they must have."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fields:
    """Named values of unknown types, read with a check. The errors do not name the file.

    Attributes:
      values: the values by name; null is the same as absent.
    """

    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Reads a file that holds one JSON object.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it does not hold a JSON object.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON ({error}); get it again") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a JSON object, got {shown(content)}; get it again")
        return cls(content)

    def get(self, name: str) -> Any:
        """The value, whatever its type, or None."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; `default` where there is none.

        Raises:
          ValueError: there is none and no default, or it is something else.
        """
        return self._checked(name, default, int, "an integer")

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number (see `integer`)."""
        value = self._checked(name, default, (int, float), "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false (see `integer`)."""
        return self._checked(name, default, bool, "true or false")

    def text(self, name: str) -> str | None:
        """A string, or None where there is none."""
        value = self.get(name)
        return None if value is None else self._checked(name, None, str, "a string")

    def nested(self, name: str) -> "Fields":
        """An object, empty where there is none; its values are named `name.key` in errors."""
        return Fields({f"{name}.{key}": value for key, value in self._checked(name, {}, dict, "an object").items()})

    def items[T](self, name: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """A list whose items are all of one type (see `integer`)."""
        items = self._checked(name, default, list, f"a list of {kind.__name__}")
        if not all(type(item) is kind for item in items):
            raise ValueError(f"{name} must be a list of {kind.__name__}, and nothing else may be in it")
        return items

    def _checked(self, name: str, default: Any, kind: type | tuple[type, ...], described: str) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} must be {described}, got {shown(value)}")
        return value


def shown(value: object) -> str:
    """A value for an error of one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
