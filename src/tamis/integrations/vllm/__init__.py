"""Tamis inside vLLM: a backend, a connector and an endpoint that do nothing until they are configured."""
