"""Keys and values kept as their own index: what stays whole, a sequence that grows, documents free of position."""
