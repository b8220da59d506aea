"""Words everyone shares: errors, strict settings, registries, environment, logging, tables. Imports nothing of ours."""
