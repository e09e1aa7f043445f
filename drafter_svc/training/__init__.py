"""Trains the DSpark drafter that ships with the package; not imported by the service."""
