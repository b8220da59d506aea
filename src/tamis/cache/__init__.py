"""Who keeps which keys and values, and in which form."""
