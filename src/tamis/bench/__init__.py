"""Speed: what is timed, on which machine, and the rows that every published number comes from."""
