"""What tests and benchmarks share: tiny checkpoints, differences, timers."""
