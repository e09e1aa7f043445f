"""Model families: one file each, read top-down."""
