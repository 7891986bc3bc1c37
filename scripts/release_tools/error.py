"""The error of the scripts that build packages."""


class ReleaseError(Exception):
    """A package cannot be built. The message names the object and the remedy."""
