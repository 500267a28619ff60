"""How a run lies on a disk or in a storage: whose it is, its rows, the items in their formats."""
