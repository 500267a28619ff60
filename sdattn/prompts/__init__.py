"""Text to words to token columns; no torch, and no pipeline.

`words` finds the words of a text, `tokenizing` the tokens of any tokenizer with their offsets,
`tokens` which columns each word owns (`Prompt`, `Word`), `chunks` the same for prompts longer than
CLIP. What a pipeline puts around a prompt before that is known in `models`.
"""
