"""The input of a run: its options, the lines, and the batches planned from them.

`sources` finds the bytes, `lines` splits them into fields (`tables`, `texts`), `values` reads one
value, `columns` assigns the columns, `items` checks them and keeps the lines that cannot be read,
`plan` groups items of one shape into batches. `request` holds the options. To add an option, begin
in `request`; for an input format, in `lines`.
"""
