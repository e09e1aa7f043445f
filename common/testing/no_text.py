"""A text decoder for tests that look at token ids only."""


class NoText:
    """Decodes every token to nothing."""

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""
