"""One run: made, saved, read, shown and compared."""
