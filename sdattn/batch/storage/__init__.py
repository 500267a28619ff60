"""How a run lies on a disk or in a storage: whose it is, its rows, the items in their formats.

`folder` is the way in. Whose it is: `manifest`, `locks` (a disk), `leases` (a storage). Rows:
`rows`, noted in `journals` (a disk) or `storage_journals`. Items: `layouts` and, for many in a
file, `shards` with `tars`, `parquets`; `objects` for a storage. `whole` says what is
there, `checking` reads it all. To add a format, subclass `Layout` or `Shards` and name it
in `formats`.
"""
