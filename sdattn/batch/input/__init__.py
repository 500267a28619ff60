"""What is asked of a run: its options, the lines of its input, and the batches planned of them.

`sources` finds the bytes, `lines` splits them into fields (`tables`, `texts`), `values` reads one
value, `columns` says which is which, `items` checks them and keeps the lines that cannot be read,
`plan` puts into one batch what has one shape. `request` holds the options. To add an option, begin
in `request`; an input format, in `lines`.
"""
