"""Generated protobuf code; never edited by hand (see proto/README.md)."""
