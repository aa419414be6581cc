"""The two kernels that devices use themselves: copying and filling words of buffers without transfer usage."""

from __future__ import annotations

from vkbackend.ops.op import Kernel

COPY_WORDS = Kernel("copy_words", local_size=128)  # bindings: source, target; push: source word, target word, count
FILL_WORDS = Kernel("fill_words", local_size=128)  # binding: target; push: target word, count, pattern
GRID = (512, 1, 1)  # both loop with a grid stride, so that one pipeline serves every size
