"""Quality: question sets, metrics and the runner that prints them beside density; nothing here is timed."""
