"""Calls one op alone: NumPy arrays in, a one-node graph on a device, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from vkbackend.graph import F32, I32, Graph, Tensor


def eager(module: ModuleType, name: str) -> Callable[..., Any]:
    """The eager form of an op module's builder: same arguments, arrays for tensors, plus `device`."""
    builder: Callable[..., Any] = getattr(module, name)

    def call(*args: Any, device: Any = "numpy", **kwargs: Any) -> Any:
        from vkbackend.device import open_device

        opened = open_device(device) if isinstance(device, str) else device
        graph = Graph()
        feeds: dict[str, Any] = {}

        def lift(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                key = f"in{len(feeds)}"
                is_float = value.dtype.kind == "f"
                feeds[key] = np.asarray(value, np.float32 if is_float else np.int32)
                return graph.input(key, value.shape, F32 if is_float else I32)
            if isinstance(value, list | tuple) and any(isinstance(v, np.ndarray) for v in value):
                return type(value)(lift(v) for v in value)
            return value

        result = builder(graph, *(lift(a) for a in args), **{k: lift(v) for k, v in kwargs.items()})
        outputs: tuple[Tensor, ...] = result if isinstance(result, tuple) else (result,)
        for i, tensor in enumerate(outputs):
            graph.output(f"out{i}", tensor)
        arrays = opened.compile(graph, poison=True).run(feeds)
        if opened is not device:
            opened.close()
        values = tuple(arrays[f"out{i}"] for i in range(len(outputs)))
        return values if isinstance(result, tuple) else values[0]

    call.__name__ = name
    call.__doc__ = builder.__doc__
    return call
