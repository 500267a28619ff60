"""Drawing a run: by processes that accelerate started, or by actors of Ray.

`local_engine` and `ray_engine` have the same methods; both have `worker.Worker`s, which draw with
`drawing.BatchDrawer` while a `Writer` writes.
"""
