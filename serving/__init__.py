"""Serving: generation engine, HTTP app on Ray Serve, generate command line."""
