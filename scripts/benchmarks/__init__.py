"""What the benchmarks share: models of real shapes, ways to watch them, machine and clock."""
