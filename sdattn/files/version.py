"""The version of this package, which goes into the files that it writes."""

__version__ = "0.2.0"
