"""How a prompt is cut and placed: segments and their token spans. Pure Python, no torch."""
