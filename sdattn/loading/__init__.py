"""Loading a pipeline of diffusers by its name, its folder or its file.

`pipelines.load_pipeline()` is the whole way: `locating` finds the model here or on the hub
(`hub` words what the hub says), `options` holds how it is to be loaded, `folder` and `index` judge
a folder before diffusers reads it, `single_files` loads a checkpoint of one file. `weight_files`
and `lora_files` judge files of weights by their headers; `lora`, `quantization`, `schedulers` and
`devices` are an option each, `lent` is for the demos alone. `outline` builds a pipeline without its
weights, to check prompts and options against. `quiet` keeps the libraries' notices away.
"""
