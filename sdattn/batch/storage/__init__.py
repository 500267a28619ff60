"""How a run lies in its folder: who has it, its rows, the items in their formats.

`folder` is the way in, `manifest` its ``batch.json``. A `storage.Storage` lists, reads, writes
whole, deletes and claims: a `disk` (with `locks`) or a `bucket` (with `leases`). All else is
written once above it: `rows`, noted in `journals`; items in `layouts`, and for many in a file in
`shards`, with `tars` and `parquets`. `whole` says what is there, `checking` reads it all. To add a
format, subclass `Layout` or `Shards` and name it in `formats`; to add a storage, write the methods
of `Storage`.
"""
