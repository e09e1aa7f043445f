"""Shared by both services; nobody imports this package itself, only its submodules."""
