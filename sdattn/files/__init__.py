"""Output files, complete or absent; paths, records, text for a terminal.

`writing` writes a file or folder so that a kill leaves the old one or the new one; `paths` keeps
names inside their folder; `addresses` are files in a storage that fsspec reaches, used like paths;
`copies` are local copies of those. `records` are dataclasses to JSON and back, with checks.
"""
