"""Decides from config.json alone which drafter a checkpoint carries and what can work."""
