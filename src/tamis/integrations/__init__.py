"""Other people's loops: Tamis inside code that calls the model itself. Never our engine."""
