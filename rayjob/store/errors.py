"""What can go wrong between a mirror and the object store."""


class StoreError(OSError):
    """The object store did not do what it was asked; the message names the object and the server."""
