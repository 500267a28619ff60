"""The live page of ``sdattn app``: type a prompt, see where its words went. Needs gradio.

`page` is what is seen and what its buttons do; `server` how it is served, to this machine's own
pages alone; `recent_runs` the runs that it shows again and hands out. An image is drawn by
`runs.generation`, and its page is that of `runs.report` in a frame.
"""
