"""Which blocks the next layer will read: a small trained projection per layer, its weights on disk, and its loss."""
