"""What must be known of a model: where it comes from, whether its attention is one we may replace, its fingerprint."""
