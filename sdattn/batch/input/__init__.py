"""What is asked of a run: its options, the lines of its input, and the batches planned of them."""
