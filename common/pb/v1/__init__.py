"""Generated stubs of package dspark.v1."""
