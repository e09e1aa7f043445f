"""The `dspark` command line."""
