"""Layers shared by target and draft models; imports no model and no service."""
