"""Any torch model, by two facts: where the text stands, and the grid of the image.

`told` holds the two facts as a family, and `told_calls` cuts a call by them. `watching` captures
such a model, whose layers are found while it runs: `module_calls` sees each call of a module
(`multi_head`: torch's own attention modules). `arguments` reads what a call's arguments tell.
`inspection` proposes both facts (`proposal`) from three calls of the model (`dry_run`), after a
capture by them was tried on what was seen (`trial`).
"""
