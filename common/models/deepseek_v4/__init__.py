"""DeepSeek-V4: the full target and the DSpark drafter that its checkpoints carry under `mtp.*`."""
