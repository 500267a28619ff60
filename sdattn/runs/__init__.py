"""One run: made, saved, read, shown and compared.

`generation`, `explaining`, edits and batches begin with `preparing.prepare()`, which checks all
that can be refused, and stand on `sampling.sample()`: one call of a pipeline under its captures.
What comes back is a `Run`, of which each image is an `ImageRun`; `packing` makes files of that and
`unpacking` a run of files, `folder` writes and reads them where `targets` lets it. `info` is their
`run.json`. `drawings` are its PNGs, `report` its page, `diff` compares two. To save something new
with a run, begin in `info` and `packing`.
"""
