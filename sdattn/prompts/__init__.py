"""Text to words to token columns; no torch, and no pipeline.

`words` splits a text into words, `tokenizing` gets tokens and their offsets from any tokenizer,
`tokens` finds the columns of each word (`Prompt`, `Word`), and `chunks` does so for prompts longer
than CLIP's. `models` knows what a pipeline puts around a prompt before that.
"""
