"""The version of this package, which goes into what it writes."""

__version__ = "0.2.0"
