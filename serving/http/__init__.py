"""HTTP side of the service: request schemas, errors, routes and the Ray Serve deployment."""
