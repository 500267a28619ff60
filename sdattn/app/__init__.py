"""The live page of ``sdattn app``: type a prompt, see where its words went. Needs gradio.

`page` holds the components and the actions of the buttons; `server` serves it to this machine's own
pages only; `recent_runs` keeps the runs that it shows again and offers for download.
`runs.generation` draws an image, and `runs.report` makes its page, shown in a frame.
"""
