"""Training of small additions to a stock model: adapters that teach it to read documents encoded alone."""
