"""Storing a run in its folder: ownership, rows, and the items in their formats.

`folder` is the entry point. A `storage.Storage` is a `disk` (with `locks`) or a `bucket` (with
`leases`); everything else is written once on top of it. To add a format, subclass `Layout` or
`Shards` and name it in `formats`; to add a storage, write the methods of `Storage`.
"""
