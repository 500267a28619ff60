"""The live page of ``sdattn app``: type a prompt, see where its words went. Needs gradio."""
