"""Tamis in any code that calls a transformers model."""
