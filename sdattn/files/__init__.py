"""Output files, complete or absent; paths, records, text for a terminal."""
