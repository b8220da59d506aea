"""Where documents lie: device, host, disk, or mere bookkeeping, under the same five verbs."""
