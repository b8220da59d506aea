"""Ways of attending to a prompt's keys and values while an answer is generated: selfindex and what it is judged by."""
