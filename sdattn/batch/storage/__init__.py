"""Storing a run in its folder: ownership, rows, and the items in their formats.

`folder` is the entry point, `manifest` its ``batch.json``. A `storage.Storage` lists, reads, writes
whole, deletes and claims: a `disk` (with `locks`) or a `bucket` (with `leases`). Everything else is
written once on top of it: `rows`, noted in `journals`; items in `layouts`, many to a file in
`shards`, with `tars` and `parquets`. `whole` finds the whole items, `checking` reads them all. To
add a format, subclass `Layout` or `Shards` and name it in `formats`; to add a storage, write the
methods of `Storage`.
"""
