"""SIFT offline: observe a document alone, encode its local and cross bits, keep them as records."""
