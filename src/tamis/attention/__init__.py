"""One call per layer that joins lists, keys and a kernel; how it gets into a transformers model and out again."""
