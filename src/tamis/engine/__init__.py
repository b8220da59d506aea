"""Our own loop: prompts from questions and documents, prefill, decode, and the report of what was done."""
