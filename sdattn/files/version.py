from functools import cache

__version__ = "0.2.0"


@cache
def versions() -> dict[str, str]:
    """Return the versions of sdattn and of the packages that decide what it draws."""
    from importlib.metadata import version

    packages = ("torch", "diffusers", "transformers")
    return {"sdattn": __version__, **{name: version(name) for name in packages}}
