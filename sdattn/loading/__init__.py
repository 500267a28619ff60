"""Loading a pipeline of diffusers by its name, its folder or its file.

`pipelines.load_pipeline()` runs it all: `locating` finds the model here or on the hub, `options`
holds how to load it, `folder` and `index` check a folder before diffusers reads it, `single_files`
loads a one-file checkpoint. `lora` and `devices` are one option each; `facts` reads what a folder's
files say, without torch. `file_errors` names the file in a library's error, and `quiet` hides the
libraries' notices.
"""
