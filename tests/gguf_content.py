"""The keys and tensors of a small GGUF file, to be changed and written again with gguf-py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Kind = gguf.GGMLQuantizationType


@dataclass
class Key:
    """One metadata value with its type, and that of its elements where it is an array."""

    value: Any
    type: gguf.GGUFValueType
    element: gguf.GGUFValueType | None = None


@dataclass
class Stored:
    """One tensor as it is stored: rows of numbers, or of block bytes (uint8) in other quantisations."""

    data: NDArray[Any]
    type: Kind

    def values(self) -> NDArray[np.float32]:
        return np.asarray(gguf.quants.dequantize(self.data, self.type), np.float32)

    def rows(self, index: Any) -> Stored:
        """Some rows, in any order, bit for bit."""
        return Stored(np.ascontiguousarray(self.data[index]), self.type)

    def cast(self, kind: str) -> Stored:
        """The same numbers in another type."""
        return stored(self.values(), kind)


def stored(values: NDArray[Any], kind: str = "F32") -> Stored:
    return Stored(gguf.quants.quantize(np.ascontiguousarray(values, np.float32), Kind[kind]), Kind[kind])


@dataclass
class Content:
    """What is in a file; to be changed freely."""

    arch: str
    keys: dict[str, Key] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The value of a key of the architecture, such as "block_count"."""
        return self.keys[f"{self.arch}.{key}"].value

    def set(self, key: str, value: int) -> None:
        self.keys[f"{self.arch}.{key}"] = Key(value, gguf.GGUFValueType.UINT32)

    def set_array(self, key: str, values: list[Any], element: gguf.GGUFValueType) -> None:
        self.keys[f"{self.arch}.{key}"] = Key(values, gguf.GGUFValueType.ARRAY, element)

    def drop(self, key: str) -> None:
        del self.keys[f"{self.arch}.{key}"]

    def rename(self, old: str, new: str) -> None:
        """Renames tensors whose names end so."""
        self.tensors = {n.removesuffix(old) + new if n.endswith(old) else n: t for n, t in self.tensors.items()}

    def with_arch(self, arch: str) -> Content:
        keys = {
            arch + k.removeprefix(self.arch) if k.startswith(self.arch + ".") else k: v for k, v in self.keys.items()
        }
        return Content(arch, keys, dict(self.tensors))


def read_content(path: Path) -> Content:
    reader = gguf.GGUFReader(path)
    keys = {
        f.name: Key(f.contents(), f.types[0], f.types[-1] if f.types[0] == gguf.GGUFValueType.ARRAY else None)
        for f in reader.fields.values()
        if not f.name.startswith("GGUF.")
    }
    arch = keys.pop("general.architecture", Key("qwen35", gguf.GGUFValueType.STRING)).value  # later parts have none
    return Content(arch, keys, {t.name: Stored(np.array(t.data), t.tensor_type) for t in reader.tensors})


def write_content(content: Content, path: Path, per_part: int = 0, small_first: bool = False) -> Path:
    """Writes a file, or several of `per_part` tensors each; returns the path of the (first) file.

    small_first: the first part holds no tensors.
    """
    w = gguf.GGUFWriter(path, content.arch, split_max_tensors=per_part, small_first_shard=small_first)
    for name, key in content.keys.items():
        w.add_key_value(name, key.value, key.type, key.element)
    for name, t in content.tensors.items():
        w.add_tensor(name, t.data, raw_dtype=t.type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path if path.exists() else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
