"""The input of a run: its options, the lines, and the batches planned from them.

`sources` finds the bytes, `lines` splits them into fields, `values` reads one value, `columns`
assigns the columns, `items` checks them, `plan` groups them into batches. To add an option, begin
in `request`; for an input format, in `lines`.
"""
