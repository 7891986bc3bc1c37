"""The parts of `scripts/package` and `scripts/release`. Uses only the standard library."""
