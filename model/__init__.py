"""Model files, and the models themselves: GGUF, tokenizer, memory, graphs, contexts."""
