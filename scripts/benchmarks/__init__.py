"""What ``scripts/bench`` can measure: one module per command, the others are their parts."""
