"""Hugging Face checkpoints of the Qwen3.5 family to GGUF files: `convert`."""

from vkbackend.model.convert.write import TYPES, convert

__all__ = ["TYPES", "convert"]
