"""Loading a pipeline of diffusers by its name, its folder or its file.

`pipelines.load_pipeline()` runs it all: `locating` finds the model here or on the hub, `options`
holds how to load it, `folder` and `index` check a folder before diffusers reads it, `single_files`
loads a one-file checkpoint. `weight_files` and `lora_files` check files of weights by their
headers; `lora` and `devices` are one option each. `outline` builds a pipeline without its weights,
to check prompts and options against; `facts` reads what a folder's files say, without torch.
`quiet` hides the libraries' notices.
"""
