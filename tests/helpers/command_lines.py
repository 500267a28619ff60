"""Commands as people type them."""

import re

import typer

from sdattn import cli

PROMPT = "a red cat and a dog"
COMMANDS = typer.main.get_command(cli.commands).commands


def generate(invoke, model, *more, prompt=PROMPT):
    return invoke("generate", prompt, "--model", model, "--steps", "2", "--device", "cpu", *more)


def said(text):
    """What was printed, without the frame around it and the lines it was broken into."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
