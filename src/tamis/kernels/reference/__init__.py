"""The truth in plain PyTorch, one op per file; imports no other kernel family."""
