"""Processes that begin at once: forks of one that has imported everything.

A new Python imports torch and diffusers for seconds before it does what a test is about. From there
on a fork is a process like any other: its files, locks, signals and memory are its own. How the
command starts is for tests that start Python.
"""

import multiprocessing

IMPORTED = [
    "helpers.fewer_collections",  # of garbage, while the others are imported
    "sdattn.cli",
    "sdattn.batch.run",
    "accelerate",
    "diffusers.guiders",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "transformers.models.clip.modeling_clip",
]


def fork(target, *arguments, daemon=False):
    """A process that runs a function; it is begun from one without threads, unlike this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process
